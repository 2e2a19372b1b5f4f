"""Running sums over time in float64, for quantities whose sums outgrow float32: phases and logarithms of decays."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import place_on_one_axis

BLOCK = 1024


@triton.jit
def _scan_kernel(
    x_ptr, totals_ptr, out_ptr, length, columns, blocks, stride_batch, stride_time, stride_column,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, TOTALS_ONLY: tl.constexpr,
):  # fmt: skip
    """Sums within a block of tokens, plus the totals of all blocks before it (REVERSE: after it).

    A first launch (TOTALS_ONLY) leaves the blocks' totals, so that the second needs no block to wait for another.
    """
    block, sequence = place_on_one_axis(blocks)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x_ptr += (sequence // columns) * stride_batch + (sequence % columns) * stride_column
    x = tl.load(x_ptr + tokens.to(tl.int64) * stride_time, mask=tokens < length, other=0.0).to(tl.float64)
    total = tl.sum(x, axis=0)
    if TOTALS_ONLY:
        tl.store(totals_ptr + sequence * blocks + block, total)
    else:
        others = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, blocks, BLOCK):
            index = start + tl.arange(0, BLOCK)
            wanted = (index > block) if REVERSE else (index < block)
            others += tl.load(totals_ptr + sequence * blocks + index, mask=wanted & (index < blocks), other=0.0)
        sums = tl.cumsum(x, axis=0)
        if REVERSE:
            sums = total - sums + x
        tl.store(out_ptr + sequence * length + tokens, sums + tl.sum(others, axis=0), mask=tokens < length)


def running_sum(x: Tensor, *, reverse: bool = False) -> Tensor:
    """Σ_{j≤i} x_j, or Σ_{j≥i} x_j in reverse, over the second axis: (b, t, c) → (b, c, t) float64."""
    batch, length, columns = x.shape
    blocks = triton.cdiv(length, BLOCK)
    totals = x.new_empty(batch, columns, blocks, dtype=torch.float64)
    out = x.new_empty(batch, columns, length, dtype=torch.float64)
    for totals_only in (True, False):
        _scan_kernel[(blocks * batch * columns,)](
            x, totals, out, length, columns, blocks, *x.stride(),
            BLOCK=BLOCK, REVERSE=reverse, TOTALS_ONLY=totals_only, enable_fp_fusion=True,
        )  # fmt: skip
    return out
