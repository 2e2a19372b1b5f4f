"""Cross-entropy loss of logits, fused with its gradient, which overwrites the logits: two reads and one write.

`sympow.kernels.reference.cross_entropy_reference` is the plain PyTorch reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import LOG2_E
from sympow.kernels.launch import flat_grid, launch

BLOCK = 4096
WARPS = 16


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, target_ptr, loss_ptr, row_stride, columns, vocabulary, scale, BLOCK: tl.constexpr
):
    """One row: the loss log Σ exp x − x_target; x is overwritten by scale · (softmax(x) − 1 at the target)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    # A target outside the vocabulary makes the loss NaN, rather than reading another row.
    known = (target >= 0) & (target < vocabulary)
    chosen = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    # One running maximum per lane: a shared one would synchronize the warps at every step.
    largest = tl.zeros((BLOCK,), tl.float32) + tl.where(known, chosen * LOG2_E, 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + offsets
        x = tl.load(logits_ptr + column, mask=column < vocabulary, other=float("-inf"), eviction_policy="evict_last")
        x = x.to(tl.float32) * LOG2_E
        higher = tl.maximum(largest, x)
        total = total * tl.exp2(largest - higher) + tl.exp2(x - higher)
        largest = higher
    highest = tl.max(largest, axis=0)
    normalizer = highest + tl.log2(tl.sum(total * tl.exp2(largest - highest), axis=0))
    tl.store(loss_ptr + row, normalizer / LOG2_E - chosen)
    for start in range(0, columns, BLOCK):
        column = start + offsets
        x = tl.load(logits_ptr + column, mask=column < vocabulary, other=float("-inf"), eviction_policy="evict_first")
        x = x.to(tl.float32) * LOG2_E
        gradient = tl.exp2(x - normalizer) - tl.where(column == target, 1.0, 0.0)
        gradient = tl.where(column < vocabulary, gradient * scale, 0.0)
        tl.store(
            logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < columns,
            eviction_policy="evict_first",
        )  # fmt: skip


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, vocabulary: int, scale: float, block: int = BLOCK, warps: int = WARPS
) -> Tensor:
    """−log softmax(logits)[target] of every row, (rows,) float32; `logits` become scale times their gradient.

    Args:
        logits: (rows, columns), rows contiguous; overwritten.
        targets: (rows,) integers below the vocabulary.
        vocabulary: how many columns are tokens; the padding after them gets gradient 0.
        scale: the factor of the gradient, such as 1 / rows for a mean.
    """
    rows, columns = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    block = min(block, triton.next_power_of_2(columns))
    launch(
        _cross_entropy_kernel, flat_grid(rows),
        logits, targets, losses, logits.stride(0), columns, vocabulary, scale,
        BLOCK=block, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    return losses
