"""Running sums over time in float64, for quantities whose sums outgrow float32: phases and logarithms of decays."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sympow.kernels.common import place_on_one_axis

SCAN_BLOCK = 1024


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
    blocks = triton.cdiv(length, SCAN_BLOCK)
    totals = x.new_empty(batch, columns, blocks, dtype=torch.float64)
    out = x.new_empty(batch, columns, length, dtype=torch.float64)
    for totals_only in (True, False):
        _scan_kernel[(blocks * batch * columns,)](
            x, totals, out, length, columns, blocks, *x.stride(),
            BLOCK=SCAN_BLOCK, REVERSE=reverse, TOTALS_ONLY=totals_only, enable_fp_fusion=True,
        )  # fmt: skip
    return out


DRIFT_BLOCK = 256


def boundary_anchors(crossing: Tensor, boundaries: tuple[int, int], length: int, chunk: int) -> Tensor:
    """Anchors a chunk apart, from what crosses the boundaries that have states, (b, h, boundaries).

    Pairs across a boundary meet in its state. Where there is none, no pair lies across.
    """
    first, last = boundaries
    missing = (first, -(-length // chunk) - last)
    return pad(crossing, missing) if any(missing) else crossing


@triton.jit
def _at(sums_ptr, anchors_ptr, positions, mask, length, spacing):
    """The sums at `positions`, put right; 0 where `mask` is False."""
    before = positions // spacing
    left = before * spacing
    right = tl.minimum(left + spacing, length)
    missing_left = -tl.load(sums_ptr + left, mask=mask, other=0.0)
    # Nothing comes after the last token.
    missing_right = -tl.load(sums_ptr + right, mask=mask & (right < length), other=0.0)
    if anchors_ptr is not None:
        missing_left += tl.load(anchors_ptr + before, mask=mask, other=0.0)
        missing_right += tl.load(anchors_ptr + before + 1, mask=mask, other=0.0)
    passed = (positions - left).to(tl.float64) / tl.maximum(right - left, 1).to(tl.float64)
    moved = missing_left + passed * (missing_right - missing_left)
    return tl.where(mask, tl.load(sums_ptr + positions, mask=mask, other=0.0) + moved, 0.0)


@triton.jit
def _anchor_kernel(
    sums_ptr, anchors_ptr, document_end_ptr, out_ptr, length, heads, spacing, anchors,
    DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, sequence = place_on_one_axis(tl.cdiv(length, BLOCK))
    positions = block * BLOCK + tl.arange(0, BLOCK)
    mask = positions < length
    sums_ptr += sequence * length
    if anchors_ptr is not None:
        anchors_ptr += sequence * anchors
    value = _at(sums_ptr, anchors_ptr, positions, mask, length, spacing)
    if DOCUMENTS:
        end = tl.load(document_end_ptr + positions, mask=mask, other=0)
        value -= _at(sums_ptr, anchors_ptr, end, mask & (end < length), length, spacing)
    out = ((sequence // heads) * length + positions) * heads + sequence % heads
    tl.store(out_ptr + out, value.to(out_ptr.dtype.element_ty), mask=mask)


def anchored(
    suffix: Tensor,
    anchors: Tensor | None,
    spacing: int,
    document_end: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Suffix sums brought to the values they are known to have, time before heads: (b, t, h).

    Args:
        suffix: Σ_{i≥m}, (b, h, t) float64.
        anchors: what the sums are at the positions 0, spacing, 2 spacing, … and t, (b, h, ⌈t / spacing⌉ + 1) float64;
            None: 0 everywhere.
        spacing: between two anchors.
        document_end: one past the last token of each token's document, (t,): sums then reach no further; or None.
        dtype: of the result.
    """
    batch, heads, length = suffix.shape
    out = suffix.new_empty(batch, length, heads, dtype=dtype)
    anchors = None if anchors is None else anchors.contiguous()
    _anchor_kernel[(triton.cdiv(length, DRIFT_BLOCK) * batch * heads,)](
        suffix.contiguous(), anchors, document_end, out, length, heads, spacing,
        0 if anchors is None else anchors.shape[-1], DOCUMENTS=document_end is not None, BLOCK=DRIFT_BLOCK,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out
