"""Multiplies queries and keys by their decays, for a gate per rotated pair.

A gate γ of pair m scales both entries of pair m of every earlier key by γ^(1/p). Let G be the running sum of log γ of
each pair. Then entry m contributes exp((G_i − G_j)/p) q_im k_jm to a score. If a boundary R lies between key j and
query i, this factors into exp((G_i − G_R)/p) q_im, the query decayed from the boundary, and exp((G_R − G_j)/p) k_jm,
the key decayed to the boundary. No exponent is positive, and a factor underflows only if its contribution vanishes.

Tokens are grouped in blocks of `BLOCK` and tiles of `TILE`. Queries are decayed from the start of their block ("near")
or tile ("far"), keys to the end of their block or tile. For a query and a key in different blocks or tiles there
remains one factor per entry, the product of the decays across the blocks or tiles between them, which the kernels apply
as they visit these. Scores within a block do not factor (`neighbours`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import power_of_two_scale, split_program_id
from sympow.kernels.launch import ceil_div, empty_aligned, launch, rows_contiguous

# Tokens within which scores are computed element by element: the smallest tile of a matrix product.
BLOCK = 16
# Tokens per tile of keys, or of queries where keys are the rows.
TILE = 64
# Decay tables are padded to multiples of this many tokens, the most rows of a CTA.
LARGEST_TILE = 128
# exp(−110) is 0 in float32, subnormals included.
CLOSED = tl.constexpr(-110.0)


@triton.jit
def log_roots(log_gamma_ptr, batch, kv_head, tokens, entries, length, kv_heads, pairs, POWER: tl.constexpr):
    """log γ^(1/p) of the given tokens and entries, finite even where γ = 0; 0 past the last token and pair.

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
    x_ptr, stride_b, stride_t, stride_h, log_gamma_ptr, across_blocks_ptr, beyond_ptr, near_ptr, far_ptr, chunk_ptr,
    out_stride_b, out_stride_t, out_stride_h, scale_ptr, length, heads, pairs, tiles, all_blocks,
    GROUP: tl.constexpr, D: tl.constexpr, POWER: tl.constexpr, KEYS: tl.constexpr, CHUNKED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Queries of a tile times their decays from the start of their block and from that of their tile; KEYS: keys times
    their decays to the end of their block and to that of their tile.

    Queries are first multiplied by their `power_of_two_scale`, which is stored. CHUNKED: also times their decays from
    the start (KEYS: to the end) of their chunk.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    tile, sequence = split_program_id(tiles)
    batch, head = (sequence // heads).to(tl.int32), (sequence % heads).to(tl.int32)
    kv_head = head // GROUP
    blocks = tl.arange(0, BLOCKS)
    entries = tl.arange(0, D)[None, :]
    source = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + entries
    target = batch.to(tl.int64) * out_stride_b + head.to(tl.int64) * out_stride_h + entries
    # The decay across all blocks between a token's block and the start (KEYS: the end) of the tile.
    kv_sequence = (batch * (heads // GROUP) + kv_head).to(tl.int64)
    across_blocks_ptr += (kv_sequence * all_blocks + tile * BLOCKS) * D + entries
    rest = tl.full((BLOCKS, D), 1.0, tl.float32)
    for block in tl.static_range(BLOCKS):
        between = blocks < block if KEYS else blocks > block
        rest = tl.where(between[:, None], rest * tl.load(across_blocks_ptr + block * D), rest)
    if CHUNKED:
        beyond = tl.load(beyond_ptr + (kv_sequence * (all_blocks // BLOCKS) + tile) * D + entries)
    total = tl.zeros((BLOCKS, D), tl.float32)
    for step in tl.static_range(BLOCK):
        place = BLOCK - 1 - step if KEYS else step
        tokens = tile * TILE + blocks * BLOCK + place
        inside = (tokens < length)[:, None]
        x = tl.load(source + tokens.to(tl.int64)[:, None] * stride_t, mask=inside, other=0.0).to(tl.float32)
        roots = log_roots(log_gamma_ptr, batch, kv_head, tokens[:, None], entries, length, heads // GROUP, pairs, POWER)
        if KEYS:
            # A key decays by the gates after it.
            near = x * tl.exp(total)
            total += roots
        else:
            scale = power_of_two_scale(x)
            tl.store(scale_ptr + sequence * length + tokens, scale, mask=tokens < length)
            total += roots
            near = x * scale[:, None] * tl.exp(total)
        places = target + tokens.to(tl.int64)[:, None] * out_stride_t
        tl.store(near_ptr + places, near.to(near_ptr.dtype.element_ty), mask=inside)
        far = near * rest
        tl.store(far_ptr + places, far.to(far_ptr.dtype.element_ty), mask=inside)
        if CHUNKED:
            tl.store(chunk_ptr + places, (far * beyond).to(chunk_ptr.dtype.element_ty), mask=inside)


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
    """Decays of each entry across blocks and tiles; both entries of a pair have the same decay.

    Attributes:
        across_blocks: the decay exp((G_end − G_start)/p) across each block, (b, h_kv, n, d) float32. The n blocks are
            padded to a multiple of `LARGEST_TILE` tokens; gates past the last token are 1.
        across_tiles: the decay across each tile, (b, h_kv, n, d) float32.
    """

    across_blocks: Tensor
    across_tiles: Tensor


def decay_tables(log_gamma: Tensor, dim: int, power: int) -> DecayTables:
    """The decays between blocks and tiles, from log γ (b, t, h_kv, pairs) contiguous, for heads of `dim` entries."""
    batch, length, heads, pairs = log_gamma.shape
    tiles = ceil_div(length, LARGEST_TILE) * (LARGEST_TILE // TILE)
    across_blocks = log_gamma.new_empty(batch, heads, tiles * (TILE // BLOCK), dim, dtype=torch.float32)
    across_tiles = log_gamma.new_empty(batch, heads, tiles, dim, dtype=torch.float32)
    launch(
        decay_tables_kernel, (tiles * batch * heads,),
        log_gamma, across_blocks, across_tiles, length, heads, pairs, tiles,
        D=dim, POWER=power, BLOCK=BLOCK, TILE=TILE, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return DecayTables(across_blocks, across_tiles)


def _decay_tokens(
    x: Tensor, log_gamma: Tensor, tables: DecayTables, beyond: Tensor | None, scale: Tensor | None, power: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    batch, length, heads, dim = x.shape
    tiles = ceil_div(length, TILE)
    near, far = empty_aligned(x, *x.shape), empty_aligned(x, *x.shape)
    in_chunk = None if beyond is None else empty_aligned(x, *x.shape)
    x = rows_contiguous(x)
    launch(
        decay_tokens_kernel, (tiles * batch * heads,),
        x, *x.stride()[:3], log_gamma, tables.across_blocks, beyond, near, far, in_chunk, *near.stride()[:3], scale,
        length, heads, log_gamma.shape[-1], tiles, tables.across_blocks.shape[2],
        GROUP=heads // log_gamma.shape[2], D=dim, POWER=power, KEYS=scale is None, CHUNKED=beyond is not None,
        BLOCK=BLOCK, TILE=TILE, num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    return near, far, in_chunk


def decay_queries(
    q: Tensor, log_gamma: Tensor, tables: DecayTables, power: int, since: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Scaled queries, decayed from the start of their block, of their tile and, with `since`, of their chunk; and their
    scales.

    Args:
        q: (b, t, h, d) with d a power of two; the results have its shape, the scales are (b, h, t) float32.
        log_gamma: (b, t, h_kv, pairs) contiguous.
        tables: from `decay_tables`.
        since: decays from the start of a chunk to that of each of its tiles (`states.chunk_decays`); None: the third
            result is None.
    """
    scale = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return *_decay_tokens(q, log_gamma, tables, since, scale, power), scale


def decay_keys(
    k: Tensor, log_gamma: Tensor, tables: DecayTables, power: int, until: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys (b, t, h_kv, d), decayed to the end of their block, of their tile and, with `until`, of their chunk.

    Args:
        until: decays from the end of a tile to that of its chunk (`states.chunk_decays`); None: the third result is
            None.
    """
    return _decay_tokens(k, log_gamma, tables, until, None, power)
