"""Gradient of the gates, with one gate per rotated pair.

B_ij depends on G_im as if q_im were multiplied by exp(G_im/p), and on G_jm as if k_jm were divided by exp(G_jm/p). So
for pair m of tokens i and n
    p dG_im = Σ q_im dq_im − k_im dk_im   over the two entries of the pair,    d log γ_nm = Σ_{i≥n} dG_im.
The reverse cumulative sums are taken in float64, over totals of tiles and then within each tile. Their drift by
rounding is corrected as for one gate per head (`running_sums`): at positions where the exact sum is known, it replaces
the computed one, and between these positions the correction is interpolated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sympow.kernels.common import split_program_id
from sympow.kernels.launch import ceil_div, launch
from sympow.kernels.pair_gates.decays import TILE


@triton.jit
def gate_gradient_kernel(
    terms_ptr, later_ptr, drift_ptr, out_ptr, length, kv_heads, pairs, tiles, spacing, positions,
    POWER: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """d log γ of a tile of tokens: the sum over later tiles, the sum within the tile, and the drift correction."""
    tile, sequence = split_program_id(tiles)
    tokens = tile * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, PAIRS)
    inside = (tokens < length)[:, None]
    source = terms_ptr + (sequence * length + tokens.to(tl.int64)[:, None]) * PAIRS + columns[None, :]
    terms = tl.load(source, mask=inside, other=0.0).to(tl.float64)
    sums = tl.cumsum(terms, axis=0, reverse=True)
    sums += tl.load(later_ptr + (sequence * tiles + tile) * PAIRS + columns)[None, :]
    interval = tile * TILE // spacing
    left = interval * spacing
    width = tl.minimum(left + spacing, length) - left
    drift = drift_ptr + (sequence * positions + interval) * PAIRS + columns
    drift_left, drift_right = tl.load(drift), tl.load(drift + PAIRS)
    fraction = (tokens - left).to(tl.float64) / width.to(tl.float64)
    sums += drift_left[None, :] + fraction[:, None] * (drift_right - drift_left)[None, :]
    batch, head = sequence // kv_heads, sequence % kv_heads
    out = out_ptr + ((batch * length + tokens.to(tl.int64)[:, None]) * kv_heads + head) * pairs + columns[None, :]
    value = (sums * (1.0 / POWER)).to(out_ptr.dtype.element_ty)
    tl.store(out, value, mask=inside & (columns < pairs)[None, :])


def crossing_sums(terms: Tensor, spacing: int) -> Tensor:
    """Sums of terms (i, j) with j < n ≤ i, by pair, at n = spacing, 2 spacing, …: (b, h_kv, count, d/2) float64.

    Args:
        terms: sums of the terms over the queries i of each block of `spacing` tokens and the keys j of each tile of
            `TILE` tokens, (b, h_kv, blocks, tiles, d) float32.
    """
    blocks, tiles = terms.shape[2:4]
    by_pair = terms.unflatten(-1, (-1, 2)).sum(-1, dtype=torch.float64)
    padded = pad(by_pair, (0, 0, 0, blocks * (spacing // TILE) - tiles))
    by_block = padded.unflatten(3, (blocks, -1)).sum(4)  # (b, h_kv, blocks of queries, blocks of keys, d/2)
    later = by_block.flip(2).cumsum(2).flip(2)
    return later.cumsum(3)[:, :, 1:, :-1].diagonal(dim1=2, dim2=3).transpose(2, 3)


def gate_gradient(
    terms: Tensor, totals: Tensor, crossing: Tensor | None, spacing: int, power: int, pairs: int
) -> Tensor:
    """d log γ, (b, t, h_kv, pairs) float32.

    Args:
        terms: p dG by pair, (b, h_kv, t, n) float32 with n ≥ pairs.
        totals: sums of `terms` over tiles of `TILE` tokens, (b, h_kv, tiles, n) float64.
        crossing: the exact sums p Σ_{i≥m} dG_i at the tokens m = spacing, 2 spacing, … below t, (b, h_kv, count, n)
            float64; None: there are no such tokens.
        spacing: a multiple of `TILE`.
        power: p.
        pairs: number of pairs with a gate.
    """
    batch, heads, length, columns = terms.shape
    tiles = totals.shape[2]
    sums = pad(totals.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    # Drift at 0, at the multiples of `spacing`, and at the end. At both ends the exact sum is 0: no term crosses them.
    drift = totals.new_zeros(batch, heads, ceil_div(length, spacing) + 1, columns)
    if crossing is not None:
        drift[:, :, 1:-1] = crossing
    drift[:, :, :-1] -= sums[:, :, : tiles : spacing // TILE]
    out = terms.new_empty(batch, length, heads, pairs)
    launch(
        gate_gradient_kernel, (tiles * batch * heads,),
        terms, sums[:, :, 1:].contiguous(), drift, out, length, heads, pairs, tiles, spacing,
        drift.shape[2],
        POWER=power, PAIRS=columns, TILE=TILE, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
