"""Both forms for Hopper GPUs (sm_90) in Gluon, Triton's lower-level language, warp-specialised: bfloat16.

The same computation as `sympow.kernels.attention`, whose plain PyTorch twin is also the reference of these kernels.
`forward` and `backward` are the attention form for heads of more than 32, and `chunked` is the chunked form for heads
of 128. This module decides whether they are used; it does not import Gluon, which other releases of Triton lack or
have changed.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import triton
from torch import Tensor

# Heads are padded with zeros to the next of these. Smaller ones than half of the first run on the portable kernels.
WIDTHS = (64, 128)
# Gluon changes between releases of Triton. These compile every kernel (`make triton-versions`).
RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these kernels support the queries, keys and values; otherwise the portable kernels run."""
    return (
        torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and all(WIDTHS[0] // 2 < x.shape[-1] <= WIDTHS[-1] for x in (q, v))
        and _compiled_by_this_release()
    )


def supports_chunks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `chunked` supports the queries, keys and values of a chunked call, p = 2, which are not padded."""
    return q.shape[-1] == v.shape[-1] == WIDTHS[-1] and supports(q, k, v)


@cache
def _compiled_by_this_release() -> bool:
    """Whether the installed Triton is one of `RELEASES`; warns, once, if it is not."""
    if triton.__version__.startswith(RELEASES):
        return True
    warnings.warn(
        f"the Hopper kernels are not used with Triton {triton.__version__}, for which they are not known to compile:"
        f" they need one of {', '.join(name + 'x' for name in RELEASES)}. The portable kernels compute the same; on an"
        " H200 they took 8 to 15 % longer forward with heads of 64, and with heads of 128 1.4 times as long forward and"
        " 1.6 times as long forward and backward.",
        stacklevel=2,
    )
    return False
