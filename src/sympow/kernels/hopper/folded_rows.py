"""Queries of float16 with the factors of their gradients folded in, for the gradient of keys on Hopper.

See `sympow.kernels.float16_range` for the factors. The portable kernels multiply the weights of each query by its
factor instead, in float32; the warp-specialized kernel has no registers left for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import split_program_id
from sympow.kernels.float16_range import (
    FOLDED_LIMIT,
    FOLDED_VALUE_FACTOR,
    GRADIENT_FACTOR,
    GRADIENT_SCALES,
    KEY_UNIT,
    VALUE_FACTOR,
    RowGradients,
    power_of_two,
)
from sympow.kernels.launch import block_dim, ceil_div, empty_aligned, flat_grid, head_major, launch
from sympow.kernels.running_sums import SplitSums


@dataclass(frozen=True)
class FoldedRows:
    """Queries with their factors folded in: (2^e_i / w_i 2^g)^(1/p) q_i, so that the gradient of keys needs no factor.

    With s' the score of such a query, s'^p is the weight that dv_j sums and s'^(p−1) dB q' what dk_j sums.

    Attributes:
        q: those queries, for keys that are 2^FOLDED_EXPONENT long at most, (b, t, h, d).
        decayed: the same, times the p-th root of the decay from the start of their block of 128 tokens; q without
            gates.
        minus_delta: −δ'' with the factor of dy'' · v − δ'' that goes with them, (b, h, ≥ t) float32.
    """

    q: Tensor
    decayed: Tensor
    minus_delta: Tensor


@triton.jit
def fold_factors_kernel(
    q_desc, folded_desc, decayed_desc, factor_ptr, delta_ptr, folded_delta_ptr, whole_ptr, rest_ptr, scales_ptr,
    padded, gates_padded, heads, tiles,
    GROUP: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`FoldedRows` of a block of rows."""
    tile, sequence = split_program_id(tiles, tl.int32)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = (batch * (heads // GROUP) + head // GROUP).to(tl.int64)
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    scales_ptr += kv_sequence * GRADIENT_SCALES
    out = sequence.to(tl.int64) * padded + rows
    change = tl.load(scales_ptr + FOLDED_VALUE_FACTOR) / tl.load(scales_ptr + VALUE_FACTOR)
    tl.store(folded_delta_ptr + out, tl.load(delta_ptr + out) * change)

    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D).to(tl.float32)
    factor = tl.load(factor_ptr + out)
    # All are powers of two: scores with keys of the same block are exact.
    log_root = tl.log2(tl.where(factor == 0, 1.0, factor)) + tl.log2(tl.load(scales_ptr + GRADIENT_FACTOR))
    log_root = log_root / POWER - tl.log2(tl.load(scales_ptr + KEY_UNIT))
    most = tl.max(tl.abs(q), axis=1)
    log_root = tl.minimum(tl.floor(log_root + 0.5), tl.floor(-tl.log2(tl.where(most == 0, 1.0, most)) + FOLDED_LIMIT))
    root = tl.where(factor == 0, 0.0, power_of_two(tl.maximum(log_root, -120.0)))
    folded_desc.store([batch, head, first, 0], (q * root[:, None]).to(tl.float16).reshape(1, 1, ROWS, D))
    if GATED:
        whole_ptr += kv_sequence * gates_padded
        rest_ptr += kv_sequence * gates_padded
        log_decay = (tl.load(whole_ptr + rows) - tl.load(whole_ptr + first)).to(tl.float32)
        log_decay += tl.load(rest_ptr + rows) - tl.load(rest_ptr + first)
        root *= tl.exp2(log_decay * (1.0 / POWER))
        decayed_desc.store([batch, head, first, 0], (q * root[:, None]).to(tl.float16).reshape(1, 1, ROWS, D))


def fold_factors(rows: RowGradients, split: SplitSums | None, power: int, kv_heads: int, block: int) -> FoldedRows:
    """What the gradient of keys on Hopper reads of rows.

    Args:
        split: the sums of the gates; None: there are none.
        block: tokens per block of decays.
    """
    batch, length, heads, dim = rows.q.shape
    padded = rows.factor.shape[-1]
    tiles = ceil_div(length, block)
    assert tiles * block == padded
    d = block_dim(dim)
    q = empty_aligned(rows.q, *rows.q.shape)
    decayed = q if split is None else empty_aligned(rows.q, *rows.q.shape)
    minus_delta = torch.empty_like(rows.minus_delta)
    launch(
        fold_factors_kernel, flat_grid(tiles, batch * heads),
        head_major(rows.q, (block, d)), head_major(q, (block, d)), head_major(decayed, (block, d)), rows.factor,
        rows.minus_delta, minus_delta, split and split.whole, split and split.rest, rows.scales,
        padded, split.whole.shape[-1] if split else 0, heads, tiles,
        GROUP=heads // kv_heads, POWER=power, GATED=split is not None, D=d, ROWS=block, num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return FoldedRows(q, decayed, minus_delta)
