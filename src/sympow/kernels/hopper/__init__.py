"""The attention form for Hopper GPUs (sm_90) in Gluon, Triton's lower-level language: heads of 64 to 128, bfloat16.

The same computation as `sympow.kernels.attention`, whose plain PyTorch twin is also the reference of these kernels.
`forward` and `backward` are for heads of 64, `wide_forward` and `wide_backward` for larger ones, and `chunked` is the
chunked form for heads of 128. This module decides which of them a call runs on; it imports Gluon, which other releases
of Triton lack or have changed, only for such a call.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

NARROW, LARGEST = 64, 128
# For longer sequences of heads of 64 the portable kernel of the keys' gradient is faster.
NARROW_KEY_GRADIENT_MAX_LENGTH = 8192
# Gluon changes between releases of Triton. These compile every kernel (`make triton-versions`).
RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these kernels support the queries, keys and values; otherwise the portable kernels run."""
    return (
        torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and (q.shape[-1] == v.shape[-1] == NARROW or _is_wide(q, v))
        and _compiled_by_this_release()
    )


def supports_chunks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `chunked` supports the queries, keys and values of a chunked call, p = 2, which are not padded."""
    return q.shape[-1] == v.shape[-1] == LARGEST and supports(q, k, v)


def supports_key_gradient(k: Tensor, block_terms: Tensor | None) -> bool:
    """Whether `key_gradient` supports a call that `supports` accepts."""
    return _is_wide(k) or (block_terms is None and k.shape[1] <= NARROW_KEY_GRADIENT_MAX_LENGTH)


def attend(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward.attend` or `wide_forward.attend`, by the head dimension."""
    if _is_wide(k):
        from sympow.kernels.hopper.wide_forward import attend as run
    else:
        from sympow.kernels.hopper.forward import attend as run
    return run(q, k, v, *arguments)


def query_gradient(q: Tensor, scale: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`backward.query_gradient` or `wide_backward.query_gradient`, by the head dimension."""
    if _is_wide(k):
        from sympow.kernels.hopper.wide_backward import query_gradient as run
    else:
        from sympow.kernels.hopper.backward import query_gradient as run
    return run(q, scale, k, *arguments)


def key_gradient(
    q: Tensor, k: Tensor, *arguments: Any, block_terms: Tensor | None = None, query_block: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward.key_gradient` or `wide_backward.key_gradient`, by the head dimension."""
    if _is_wide(k):
        from sympow.kernels.hopper.wide_backward import key_gradient as run_wide

        return run_wide(q, k, *arguments, block_terms=block_terms, query_block=query_block)
    assert block_terms is None
    from sympow.kernels.hopper.backward import key_gradient as run

    return run(q, k, *arguments)


def _is_wide(*tensors: Tensor) -> bool:
    """Whether heads run on the kernels for heads of 128, padded with zeros where they are smaller."""
    return all(NARROW < x.shape[-1] <= LARGEST for x in tensors)


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
