"""The attention form for Hopper GPUs (sm_90) in Gluon, Triton's lower-level language: heads of 64, bfloat16.

The same computation as `sympow.kernels.attention`, whose plain PyTorch twin is also the reference of these kernels.
This module decides whether they are used; it does not import Gluon, which other releases of Triton lack or have
changed.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import triton
from torch import Tensor

HEAD_DIM = 64
# Gluon changes between releases of Triton. These compile every kernel (`make triton-versions`).
RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these kernels support the queries, keys and values; otherwise the portable kernels run."""
    return (
        torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape[-1] == v.shape[-1] == HEAD_DIM
        and _compiled_by_this_release()
    )


@cache
def _compiled_by_this_release() -> bool:
    """Whether the installed Triton is one of `RELEASES`; warns, once, if it is not."""
    if triton.__version__.startswith(RELEASES):
        return True
    warnings.warn(
        f"the Hopper kernels of the attention form are not used with Triton {triton.__version__}, for which they are"
        f" not known to compile: they need one of {', '.join(name + 'x' for name in RELEASES)}. The portable kernels"
        " compute the same; on an H200 they took 8 to 15 % longer forward, and 3 to 8 % longer forward and backward.",
        stacklevel=2,
    )
    return False
