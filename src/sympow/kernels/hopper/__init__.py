"""Both forms for Hopper GPUs (sm_90) in Gluon, Triton's lower-level language: bfloat16 and float16.

The same computation as `sympow.kernels.attention`, whose plain PyTorch reference is also that of these kernels.
`forward` and `backward` are the attention form, warp-specialized, for heads of 64 to 128; `short_forward` and
`short_backward` are faster for short sequences of heads of 64; and `chunked` is the chunked form for heads of 128. This
module decides which of them a call runs on, and imports Gluon, which other releases of Triton lack or have changed,
only for such a call.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from sympow.kernels.device_limits import HOPPER_WIDTHS, is_hopper
from sympow.kernels.float16_range import KeyRange, RowGradients
from sympow.kernels.running_sums import Gates

if TYPE_CHECKING:
    from sympow.kernels.hopper.common import SplitSums

# With heads of 64 the warp-specialized kernels are faster from this length on. At 4,096 tokens they take 12 % longer
# forward and backward, at 16,384 3 % less, on an H200.
LONG = 16_384
# Longest sequence for which the keys' gradient of `short_backward` is faster than that of the portable kernel.
SHORT_KEY_GRADIENT_MAX_LENGTH = 8192
# Gluon changes between releases of Triton. These compile every kernel (`make triton-versions`).
RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these kernels support the queries, keys and values; otherwise the portable kernels run."""
    return (
        is_hopper(q.device)
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(HOPPER_WIDTHS[0] <= x.shape[-1] <= HOPPER_WIDTHS[-1] for x in (q, v))
        and _compiled_by_this_release()
    )


def supports_chunks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `chunked` supports the queries, keys and values of a chunked call, p = 2, which are not padded: bfloat16,
    since it knows no scales of states."""
    return q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] == HOPPER_WIDTHS[-1] and supports(q, k, v)


def supports_key_gradient(k: Tensor, v: Tensor, block_terms: Tensor | None) -> bool:
    """Whether `key_gradient` supports a call that `supports` accepts."""
    if k.dtype == torch.float16:
        return True
    return not _is_short(k, v) or (block_terms is None and k.shape[1] <= SHORT_KEY_GRADIENT_MAX_LENGTH)


def attend(
    q: Tensor, k: Tensor, v: Tensor, power: int, gates: Gates | None, *, key_range: KeyRange | None = None
) -> tuple[Tensor, Tensor]:
    """`forward.attend` or `short_forward.attend`."""
    if _is_short(k, v):
        from sympow.kernels.hopper.short_forward import attend as run_short

        return run_short(q, k, v, power, gates, key_range=key_range)
    from sympow.kernels.hopper.forward import attend as run

    return run(q, k, v, power, gates, key_range=key_range)


def query_gradient(
    q: Tensor, scale: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int, gates: Gates | None,
    split: SplitSums | None, *, rows_half: RowGradients | None = None, key_range: KeyRange | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`backward.query_gradient` or `short_backward.query_gradient`."""
    if _is_short(k, v):
        from sympow.kernels.hopper.short_backward import query_gradient as run_short

        return run_short(q, scale, k, v, dy, minus_delta, power, gates, split, rows_half=rows_half, key_range=key_range)
    from sympow.kernels.hopper.backward import query_gradient as run

    return run(q, scale, k, v, dy, minus_delta, power, gates, split, rows_half=rows_half, key_range=key_range)


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, *arguments: Any, block_terms: Tensor | None = None, query_block: int = 0,
    rows_half: RowGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`backward.key_gradient` or `short_backward.key_gradient`, which has no registers left for float16."""
    if _is_short(k, v) and rows_half is None:
        assert block_terms is None
        from sympow.kernels.hopper.short_backward import key_gradient as run_short

        return run_short(q, k, v, *arguments)
    from sympow.kernels.hopper.backward import key_gradient as run

    return run(q, k, v, *arguments, block_terms=block_terms, query_block=query_block, rows_half=rows_half)


def _is_short(k: Tensor, v: Tensor) -> bool:
    return k.shape[-1] == v.shape[-1] == HOPPER_WIDTHS[0] and k.shape[1] < LONG


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
