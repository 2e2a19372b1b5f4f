"""Queries and keys times their decays, for a gate per rotated pair.

A gate γ of pair m scales both entries of pair m of every earlier key by γ^(1/p). With G the running sums of log γ by
pair, entry m of a score is exp((G_i − G_j)/p) q_im k_jm. For tokens on either side of a boundary R this factors into
exp((G_i − G_R)/p) q_im, which decays from the boundary to the query, times exp((G_R − G_j)/p) k_jm, which decays from
the key to the boundary. No exponent is positive, and a factor that underflows belongs to a score that vanishes.

Tokens are counted in blocks of `BLOCK` and tiles of `TILE`. Queries are decayed from the start of their block ("near")
or tile ("far"), keys to its end. Between two blocks or tiles remains one factor per entry, a product of the decays
across those that lie between, which the kernels apply as they go. Scores within a block do not factor (`neighbours`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import empty_aligned, head_major, power_of_two_scale, split_program_id

# Tokens within which scores are computed element by element: the smallest tile of a matrix product.
BLOCK = 16
# Tokens per tile of keys, or of queries where keys are the rows.
TILE = 64
# Tables cover whole tiles of this many tokens, the most rows of a CTA.
LARGEST_TILE = 128
# exp(−110) is 0 in float32, subnormals included.
CLOSED = tl.constexpr(-110.0)


@triton.jit
def log_roots(log_gamma_ptr, batch, kv_head, tokens, entries, length, kv_heads, pairs, POWER: tl.constexpr):
    """log γ^(1/p) of some tokens and entries, finite even where γ = 0; 0 past the last token and pair.

    Args:
        log_gamma_ptr: (b, t, h_kv, pairs) contiguous.
        tokens, entries: indices that broadcast against each other.
    """
    pair = entries // 2
    offset = ((batch.to(tl.int64) * length + tokens) * kv_heads + kv_head) * pairs + pair
    roots = tl.load(log_gamma_ptr + offset, mask=(tokens < length) & (pair < pairs), other=0.0).to(tl.float32)
    return tl.maximum(roots * (1.0 / POWER), CLOSED)


@triton.jit
def decay_tokens_kernel(
    x_desc, log_gamma_ptr, near_desc, far_desc, scale_ptr, length, heads, pairs, tiles,
    GROUP: tl.constexpr, D: tl.constexpr, POWER: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tokens of a tile times their decays from the start of their block, and FAR of their tile; KEYS: to its end.

    Queries are first multiplied by their `power_of_two_scale`, which is stored.
    """
    tile, sequence = split_program_id(tiles)
    batch, head = (sequence // heads).to(tl.int32), (sequence % heads).to(tl.int32)
    first = tile * TILE
    tokens = first + tl.arange(0, TILE)
    entries = tl.arange(0, D)
    x = x_desc.load([batch, head, first, 0]).reshape(TILE, D).to(tl.float32)
    # A key decays by the gates after it: shifted by one, so that the sums below need no difference.
    gated = tokens + 1 if KEYS else tokens
    roots = log_roots(
        log_gamma_ptr, batch, head // GROUP, gated[:, None], entries[None, :], length, heads // GROUP, pairs, POWER
    )
    if KEYS:
        roots = tl.where((gated % TILE != 0)[:, None], roots, 0.0)
        in_blocks = tl.where((gated % BLOCK != 0)[:, None], roots, 0.0)
    else:
        scale = power_of_two_scale(x)
        x *= scale[:, None]
        tl.store(scale_ptr + sequence * length + tokens, scale, mask=tokens < length)
        in_blocks = roots
    in_blocks = tl.cumsum(tl.reshape(in_blocks, (TILE // BLOCK, BLOCK, D)), axis=1, reverse=KEYS)
    near = x * tl.exp(tl.reshape(in_blocks, (TILE, D)))
    near_desc.store([batch, head, first, 0], near.to(near_desc.dtype).reshape(1, 1, TILE, D))
    if FAR:
        far = x * tl.exp(tl.cumsum(roots, axis=0, reverse=KEYS))
        far_desc.store([batch, head, first, 0], far.to(far_desc.dtype).reshape(1, 1, TILE, D))


@triton.jit
def decay_tables_kernel(
    log_gamma_ptr, across_blocks_ptr, across_tiles_ptr, length, kv_heads, pairs, tiles,
    D: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The decays across each block and across the whole tile."""
    tile, sequence = split_program_id(tiles)
    batch, head = (sequence // kv_heads).to(tl.int32), (sequence % kv_heads).to(tl.int32)
    tokens = tile * TILE + tl.arange(0, TILE)
    entries = tl.arange(0, D)
    roots = log_roots(
        log_gamma_ptr, batch, head, tokens[:, None], entries[None, :], length, kv_heads, pairs, POWER
    ).to(tl.float64)  # fmt: skip
    sums = tl.sum(tl.reshape(roots, (TILE // BLOCK, BLOCK, D)), axis=1)
    blocks = (sequence * tiles + tile) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    tl.store(across_blocks_ptr + blocks[:, None] * D + entries[None, :], tl.exp(sums.to(tl.float32)))
    total = tl.sum(sums, axis=0)
    tl.store(across_tiles_ptr + (sequence * tiles + tile) * D + entries, tl.exp(total.to(tl.float32)))


@dataclass(frozen=True)
class DecayTables:
    """Decays by entry, between tokens of different blocks or tiles; each pair's factor stands twice.

    Attributes:
        across_blocks: exp((G_end − G_start)/p) of each block, (b, h_kv, n, d) float32; n blocks make whole tiles of
            `LARGEST_TILE` tokens, with 1 past the last token.
        across_tiles: the same of each tile, (b, h_kv, n, d) float32.
    """

    across_blocks: Tensor
    across_tiles: Tensor


def decay_tables(log_gamma: Tensor, dim: int, power: int) -> DecayTables:
    """The decays between blocks and tiles, from log γ (b, t, h_kv, pairs) contiguous, for heads of `dim` entries."""
    batch, length, heads, pairs = log_gamma.shape
    tiles = triton.cdiv(length, LARGEST_TILE) * (LARGEST_TILE // TILE)
    across_blocks = log_gamma.new_empty(batch, heads, tiles * (TILE // BLOCK), dim, dtype=torch.float32)
    across_tiles = log_gamma.new_empty(batch, heads, tiles, dim, dtype=torch.float32)
    decay_tables_kernel[(tiles * batch * heads,)](
        log_gamma, across_blocks, across_tiles, length, heads, pairs, tiles,
        D=dim, POWER=power, BLOCK=BLOCK, TILE=TILE, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return DecayTables(across_blocks, across_tiles)


def _decay_tokens(x: Tensor, log_gamma: Tensor, scale: Tensor | None, power: int, *, keys: bool, far: bool) -> tuple:
    batch, length, heads, dim = x.shape
    tiles = triton.cdiv(length, TILE)
    near = empty_aligned(x, *x.shape)
    decayed = empty_aligned(x, *x.shape) if far else None
    block = (TILE, dim)
    decay_tokens_kernel[(tiles * batch * heads,)](
        head_major(x, block), log_gamma, head_major(near, block),
        None if decayed is None else head_major(decayed, block), scale, length, heads, log_gamma.shape[-1], tiles,
        GROUP=heads // log_gamma.shape[2], D=dim, POWER=power, KEYS=keys, FAR=far, BLOCK=BLOCK, TILE=TILE, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return near, decayed


def decay_queries(q: Tensor, log_gamma: Tensor, power: int, *, far: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Queries scaled and decayed from the start of their block, likewise from that of their tile if `far`, and scales.

    Args:
        q: (b, t, h, d) with d a power of two; the results have its shape, the scales are (b, h, t) float32.
        log_gamma: (b, t, h_kv, pairs) contiguous.
    """
    scale = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return *_decay_tokens(q, log_gamma, scale, power, keys=False, far=far), scale


def decay_keys(k: Tensor, log_gamma: Tensor, power: int, *, far: bool) -> tuple[Tensor, Tensor | None]:
    """Keys (b, t, h_kv, d) decayed to the end of their block, and to that of their tile if `far`."""
    near, decayed = _decay_tokens(k, log_gamma, None, power, keys=True, far=far)
    return near, decayed
