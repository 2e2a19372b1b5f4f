"""Queries and keys times the decays inside a block of tokens, for the warp-specialized kernels.

A decay factors over the power: exp(G_i − G_j) (q_i · k_j)^p = (exp((G_i − G_j) / p) q_i · k_j)^p. For a block of
queries and an earlier block of keys,
    exp(G_i − G_j) = exp(G_i − G_start) exp(G_start − G_end) exp(G_end − G_j),
with `start` the first token of the queries' block and `end` the last of the keys'. Multiplied into the keys, the last
factor costs nothing in the kernel that visits them, and the middle one is a scalar per tile. For the kernel that
visits queries, the first factor is multiplied into the queries. No exponent is positive. On the diagonal, where i and j
lie in one block, the kernels read q and k as they are.

Queries of float16 also take the factors of their gradients (`multiply_factors`; `sympow.kernels.float16_range` has
them), for the gradient of keys. The portable kernels multiply the weights of each query by its factor instead, in
float32; the warp-specialized kernel has no registers left for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import split_program_id
from sympow.kernels.float16_range import (
    FACTORED_LIMIT,
    FACTORED_VALUE_FACTOR,
    GRADIENT_FACTOR,
    GRADIENT_SCALES,
    KEY_UNIT,
    VALUE_FACTOR,
    RowGradients,
    power_of_two,
)
from sympow.kernels.launch import block_dim, ceil_div, empty_aligned, flat_grid, head_major, launch
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


@dataclass(frozen=True)
class FactoredRows:
    """Queries times their factors: (2^e_i / w_i 2^g)^(1/p) q_i, so that the gradient of keys needs no factor.

    With s' the score of such a query, s'^p is the weight that dv_j sums and s'^(p−1) dB q' what dk_j sums.

    Attributes:
        q: those queries, for keys that are 2^FACTORED_EXPONENT long at most, (b, t, h, d).
        decayed: the same, times the p-th root of the decay from the start of their block of 128 tokens; q without
            gates.
        minus_delta: −δ'' with the factor of dy'' · v − δ'' that goes with them, (b, h, ≥ t) float32.
    """

    q: Tensor
    decayed: Tensor
    minus_delta: Tensor


@triton.jit
def multiply_factors_kernel(
    q_desc, factored_desc, decayed_desc, factor_ptr, delta_ptr, factored_delta_ptr, whole_ptr, rest_ptr, scales_ptr,
    padded, gates_padded, heads, tiles,
    GROUP: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`FactoredRows` of a block of rows."""
    tile, sequence = split_program_id(tiles, tl.int32)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = (batch * (heads // GROUP) + head // GROUP).to(tl.int64)
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    scales_ptr += kv_sequence * GRADIENT_SCALES
    out = sequence.to(tl.int64) * padded + rows
    change = tl.load(scales_ptr + FACTORED_VALUE_FACTOR) / tl.load(scales_ptr + VALUE_FACTOR)
    tl.store(factored_delta_ptr + out, tl.load(delta_ptr + out) * change)

    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D).to(tl.float32)
    factor = tl.load(factor_ptr + out)
    # All are powers of two: scores with keys of the same block are exact.
    log_root = tl.log2(tl.where(factor == 0, 1.0, factor)) + tl.log2(tl.load(scales_ptr + GRADIENT_FACTOR))
    log_root = log_root / POWER - tl.log2(tl.load(scales_ptr + KEY_UNIT))
    most = tl.max(tl.abs(q), axis=1)
    log_root = tl.minimum(tl.floor(log_root + 0.5), tl.floor(-tl.log2(tl.where(most == 0, 1.0, most)) + FACTORED_LIMIT))
    root = tl.where(factor == 0, 0.0, power_of_two(tl.maximum(log_root, -120.0)))
    factored_desc.store([batch, head, first, 0], (q * root[:, None]).to(tl.float16).reshape(1, 1, ROWS, D))
    if GATED:
        whole_ptr += kv_sequence * gates_padded
        rest_ptr += kv_sequence * gates_padded
        log_decay = (tl.load(whole_ptr + rows) - tl.load(whole_ptr + first)).to(tl.float32)
        log_decay += tl.load(rest_ptr + rows) - tl.load(rest_ptr + first)
        root *= tl.exp2(log_decay * (1.0 / POWER))
        decayed_desc.store([batch, head, first, 0], (q * root[:, None]).to(tl.float16).reshape(1, 1, ROWS, D))


def multiply_factors(rows: RowGradients, split: SplitSums | None, power: int, kv_heads: int) -> FactoredRows:
    """What the gradient of keys on Hopper reads of rows; `split` as in `decayed`."""
    batch, length, heads, dim = rows.q.shape
    padded = rows.factor.shape[-1]
    tiles = ceil_div(length, BLOCK)
    assert tiles * BLOCK == padded
    d = block_dim(dim)
    q = empty_aligned(rows.q, *rows.q.shape)
    decayed = q if split is None else empty_aligned(rows.q, *rows.q.shape)
    minus_delta = torch.empty_like(rows.minus_delta)
    launch(
        multiply_factors_kernel, flat_grid(tiles, batch * heads),
        head_major(rows.q, (BLOCK, d)), head_major(q, (BLOCK, d)), head_major(decayed, (BLOCK, d)), rows.factor,
        rows.minus_delta, minus_delta, split and split.whole, split and split.rest, rows.scales,
        padded, split.whole.shape[-1] if split else 0, heads, tiles,
        GROUP=heads // kv_heads, POWER=power, GATED=split is not None, D=d, ROWS=BLOCK, num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return FactoredRows(q, decayed, minus_delta)
