"""Queries and keys with the decays inside a block of tokens folded into them, for the warp-specialized kernels.

A decay factors over the power: exp(G_i − G_j) (q_i · k_j)^p = (exp((G_i − G_j) / p) q_i · k_j)^p. For a block of
queries and an earlier block of keys,
    exp(G_i − G_j) = exp(G_i − G_start) exp(G_start − G_end) exp(G_end − G_j),
with `start` the first token of the queries' block and `end` the last of the keys'. Folded into the keys, the last
factor costs nothing in the kernel that visits them, and the middle one is a scalar per tile. For the kernel that
visits queries, the first factor is folded into the queries. No exponent is positive. On the diagonal, where i and j
lie in one block, the kernels read q and k as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import split_program_id
from sympow.kernels.launch import ceil_div, empty_aligned, flat_grid, launch
from sympow.kernels.running_sums import SplitSums

# Tokens per block: the rows of a CTA of the kernels that read these tensors.
BLOCK = 128


@triton.jit
def decay_kernel(
    x_ptr, out_ptr, whole_ptr, rest_ptr, x_stride_b, x_stride_t, x_stride_h, out_stride_b, out_stride_t, out_stride_h,
    length, padded, heads, blocks, DIM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr,
    TO_END: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of x times exp((G_end − G_i) / p), or times exp((G_i − G_start) / p)."""
    block, sequence = split_program_id(blocks)
    batch, head = sequence // heads, sequence % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    sums = (batch * (heads // GROUP) + head // GROUP) * padded
    other = first + ROWS - 1 if TO_END else first
    log_decay = (tl.load(whole_ptr + sums + rows) - tl.load(whole_ptr + sums + other)).to(tl.float32)
    log_decay += tl.load(rest_ptr + sums + rows) - tl.load(rest_ptr + sums + other)
    decay = tl.exp2(log_decay * ((-1.0 if TO_END else 1.0) / POWER))
    mask = (rows < length)[:, None] & (columns < DIM)[None, :]
    source = batch * x_stride_b + head * x_stride_h + rows.to(tl.int64)[:, None] * x_stride_t + columns[None, :]
    target = batch * out_stride_b + head * out_stride_h + rows.to(tl.int64)[:, None] * out_stride_t + columns[None, :]
    x = tl.load(x_ptr + source, mask=mask, other=0.0)
    tl.store(out_ptr + target, (x.to(tl.float32) * decay[:, None]).to(x.dtype), mask=mask)


def decayed(x: Tensor, split: SplitSums | None, power: int, *, to_end: bool) -> Tensor:
    """x (b, t, h, d), each token times the p-th root of its decay within its block of 128 tokens; x without gates.

    Args:
        split: the sums of the gates; None: there are none.
        to_end: whether decays run from the token to the end of its block (keys), or from its start (queries).
    """
    if split is None:
        return x
    batch, length, heads, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = empty_aligned(x, *x.shape)
    blocks = ceil_div(length, BLOCK)
    launch(
        decay_kernel, flat_grid(blocks, batch * heads),
        x, out, split.whole, split.rest, *x.stride()[:3], *out.stride()[:3],
        length, split.whole.shape[-1], heads, blocks, DIM=dim, COLUMNS=triton.next_power_of_2(dim),
        GROUP=heads // split.whole.shape[1], POWER=power, TO_END=to_end, ROWS=BLOCK, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return out
