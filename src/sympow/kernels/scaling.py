"""Queries of bounded length.

The output does not depend on the length of a query, so each may be scaled to keep its scores in range. A power of two
does it without rounding, and is a constant to autograd: for a function that does not depend on the scale of its
argument, the gradient with respect to the scaled argument, times the scale, is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import block_dim, empty_aligned, head_major


@triton.jit
def power_of_two_scale(x):
    """The power of two that brings the largest entry of each row into [1, 2), or 1: (rows, d) → (rows,) float32."""
    largest = tl.max(tl.abs(x.to(tl.float32)), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    scale = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest == 0, 1.0, scale)


@triton.jit
def scale_kernel(q_desc, scaled_desc, scale_ptr, length, heads, D: tl.constexpr, ROWS: tl.constexpr):
    """Each row of q times its scale, and the scales."""
    first = tl.program_id(0) * ROWS
    sequence = tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    rows = first + tl.arange(0, ROWS)
    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    scale = power_of_two_scale(q)
    scaled = (q * scale[:, None]).to(q.dtype)
    scaled_desc.store([batch, head, first, 0], scaled.reshape(1, 1, ROWS, D))
    tl.store(scale_ptr + sequence.to(tl.int64) * length + rows, scale, mask=rows < length)


def scale_queries(q: Tensor, rows: int = 128) -> tuple[Tensor, Tensor]:
    """q times a power of two per row, (b, t, h, d), and those powers, (b, h, t) float32."""
    batch, length, heads, dim = q.shape
    block = (rows, block_dim(dim))
    scaled = empty_aligned(q, *q.shape)
    scale = q.new_empty(batch, heads, length, dtype=torch.float32)
    scale_kernel[(triton.cdiv(length, rows), batch * heads)](
        head_major(q, block), head_major(scaled, block), scale, length, heads,
        D=block[1], ROWS=rows, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return scaled, scale
