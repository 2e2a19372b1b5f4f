"""Forward pass for p = 2 with a gate per rotated pair: the attention form, and the chunked form given the states.

y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij,   B_ij = (Σ_m exp((G_im − G_jm)/p) q_im k_jm)^p.

A CTA owns a tile of queries. In the chunked form it first queries the state at the start of its chunk, with queries
decayed from there. Then it visits keys from its own tile backwards:
1. The blocks of its own tile. Queries are decayed from the starts of their blocks, keys to the ends of theirs, and the
   queries are multiplied by the decays across all blocks between them and the keys. `neighbours` has computed the
   scores within a block.
2. The earlier tiles. Queries are decayed from the start of their tile, keys to the end of theirs, and one factor per
   entry is the decay across the tiles between, for all queries.
These factors are running products, so no exponential is computed here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.attention.forward import read_state
from sympow.kernels.common import (
    INTERPRETED,
    Documents,
    dot_precision,
    or_one,
    partial_row_sums,
    round_to,
    split_program_id,
    wait_for_mma,
)
from sympow.kernels.device_limits import register_limit
from sympow.kernels.launch import blocks_of, ceil_div, empty_aligned, head_major, launch
from sympow.kernels.pair_gates.decays import BLOCK, TILE, DecayTables
from sympow.kernels.states.quadratic import ChunkStates


@triton.jit
def decay_columns(x, decay):
    """x (rows, d) times one factor per column, in the dtype of x, for use as the left operand of a matrix product."""
    return x * decay.to(x.dtype)[None, :]


@triton.jit
def in_product_layout(x, D: tl.constexpr, PRECISION: tl.constexpr):
    """x (rows, d) unchanged, in the register layout of the result of a matrix product (MMA).

    A left operand computed from it then needs no layout conversion through shared memory before each product. The
    layout comes from a product with the identity matrix, which is exact.
    """
    if INTERPRETED:
        return x
    else:
        places = tl.arange(0, D)
        unit = (places[:, None] == places[None, :]).to(x.dtype)
        return tl.dot(x, unit, input_precision=PRECISION).to(x.dtype)


@triton.jit
def forward_kernel(
    q_desc, near_desc, far_desc, v_desc, v_block_desc, y_desc, denominator_ptr, neighbours_ptr, across_blocks_ptr,
    across_tiles_ptr, document_start_ptr, q_ptr, q_stride_b, q_stride_t, q_stride_h, since_desc, q_half_desc,
    first_half_desc, second_half_desc, normalizer_desc, state_share_ptr, length, padded, heads, chunk, state_count,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WITH_STATE: tl.constexpr, SECOND_COLUMN: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y_i for a tile of queries, and their denominators Σ_j B_ij. WITH_STATE: also φ(q_i) Z of the chunk's state."""
    tiles = tl.cdiv(length, ROWS)
    tile, sequence = split_program_id(tiles)
    tile = tiles - 1 - tile  # tiles with the most keys start first
    batch, head = (sequence // heads).to(tl.int32), (sequence % heads).to(tl.int32)
    kv_head = head // GROUP
    kv_sequence = (batch * (heads // GROUP) + kv_head).to(tl.int64)
    first = tile * ROWS
    places = tl.arange(0, ROWS)
    rows = first + places
    row_block = (places // BLOCK)[:, None]
    entries = tl.arange(0, D)
    across_blocks_ptr += (kv_sequence * (padded // BLOCK) + first // BLOCK) * D
    across_tiles_ptr += kv_sequence * (padded // COLUMNS) * D

    acc = tl.zeros((ROWS, E), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    boundary = first // chunk
    if WITH_STATE:
        if boundary > 0:
            # Queries that have decayed, and were scaled, since the start of the chunk.
            since = since_desc.load([batch, head, first, 0]).reshape(ROWS, D)
            q_low = q_half_desc.load([batch, head, first, 0]).reshape(ROWS, D // 2)
            q_high = q_half_desc.load([batch, head, first, D // 2]).reshape(ROWS, D // 2)
            pointers = q_ptr + batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            acc, denominator = read_state(
                acc, since, q_low, q_high, pointers, tl.full((ROWS,), 1.0, tl.float32), rows, length, q_stride_t,
                first_half_desc, second_half_desc, normalizer_desc,
                (kv_sequence * state_count + boundary - 1).to(tl.int32), D, E, D // 2, SECOND_COLUMN, PRECISION,
            )  # fmt: skip
            tl.store(state_share_ptr + sequence * length + rows, denominator, mask=rows < length)

    q = in_product_layout(q_desc.load([batch, head, first, 0]).reshape(ROWS, D), D, PRECISION)
    places_in_block = tl.arange(0, BLOCK)
    neighbours_ptr += sequence * BLOCK * padded
    neighbours = tl.load(neighbours_ptr + places_in_block[None, :] * padded + rows[:, None])

    since = tl.full((ROWS, D), 1.0, tl.float32)
    for step in tl.range(0, ROWS // BLOCK, num_stages=2):
        block = ROWS // BLOCK - 1 - step
        start = first + block * BLOCK
        k = near_desc.load([batch, kv_head, start, 0]).reshape(BLOCK, D)
        scores = tl.dot((q * since).to(q.dtype), k.T, input_precision=PRECISION)
        scores = tl.where(row_block > block, scores, tl.where(row_block == block, neighbours, 0.0))
        v = v_block_desc.load([batch, kv_head, start, 0]).reshape(BLOCK, E)
        # The weights are summed after rounding, as the product uses them (see `attention.forward`).
        scores = round_to(scores * scores, v.dtype)
        denominator += tl.sum(scores, axis=1)
        acc = wait_for_mma(tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION))
        across = tl.load(across_blocks_ptr + block * D + entries)
        since = tl.where(row_block > block, since * across[None, :], since)

    q = (q * since).to(q.dtype)
    between = tl.full((D,), 1.0, tl.float32)
    begin = boundary * chunk
    if DOCUMENTS:
        # Gates between documents are closed, so scores with tiles before the document are zero; these are skipped.
        begin = tl.maximum(begin, tl.load(document_start_ptr + first) // COLUMNS * COLUMNS)
    partial_sums = tl.zeros((ROWS, 4), tl.float32)
    for step in tl.range(0, (first - begin) // COLUMNS, num_stages=STAGES):
        start = first - (step + 1) * COLUMNS
        k = far_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        scores = tl.dot(decay_columns(q, between), k.T, input_precision=PRECISION)
        between *= tl.load(across_tiles_ptr + start // COLUMNS * D + entries)
        scores *= scores
        partial_sums += partial_row_sums(scores, ROWS, COLUMNS)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        # The wait keeps the next left operand from overwriting registers that this product still reads.
        acc = wait_for_mma(tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION))
    denominator += tl.sum(partial_sums, axis=1)

    y = acc / or_one(denominator)[:, None]
    y_desc.store([batch, head, first, 0], y.to(y_desc.dtype).reshape(1, 1, ROWS, E))
    tl.store(denominator_ptr + sequence * length + rows, denominator, mask=rows < length)


def attend(
    q: Tensor,
    near: Tensor,
    far: Tensor,
    v: Tensor,
    neighbours: Tensor,
    tables: DecayTables,
    *,
    states: ChunkStates | None = None,
    since: Tensor | None = None,
    documents: Documents | None = None,
    rows: int = 128,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (b, t, h, e), the rows' denominators Σ_j B_ij (b, h, t) float32, and φ(q_i) Z of states (b, h, t) float32.

    Args:
        q: queries, scaled and decayed from the start of their block (`decays.decay_queries`).
        near, far: keys, decayed to the end of their block and of their tile (`decays.decay_keys`).
        neighbours: scores within blocks (`neighbours.neighbour_scores`).
        states: the states at the boundaries between chunks, which are multiples of `rows`; None: all in one chunk.
        since: queries, scaled and decayed from the start of their chunk; only with states.
        documents: starts and ends of packed documents, between which gates must be closed; None: one document.
    """
    batch, length, heads, dim = q.shape
    value_dim = v.shape[-1]
    y = empty_aligned(v, batch, length, heads, value_dim)
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    state_share: Tensor | None = None
    since_desc = q_half_desc = first_half_desc = second_half_desc = normalizer_desc = None
    chunk, state_count, second_column = length + rows, 0, 0
    source = q
    if states is not None:
        assert since is not None and states.chunk % rows == 0
        state_share = torch.zeros_like(denominator)
        chunk, state_count, second_column = states.chunk, states.count, states.second_half.shape[-1] - dim // 2
        since_desc, q_half_desc = head_major(since, (rows, dim)), head_major(since, (rows, dim // 2))
        first_half_desc = blocks_of(states.first_half.flatten(0, 2), [1, 1, value_dim, dim // 2])
        second_half_desc = blocks_of(states.second_half.flatten(0, 2), [1, 1, value_dim, dim // 2])
        normalizer_desc = blocks_of(states.normalizer.flatten(0, 2), [1, dim, dim])
        source = since
    launch(
        forward_kernel, (ceil_div(length, rows) * batch * heads,),
        head_major(q, (rows, dim)), head_major(near, (BLOCK, dim)), head_major(far, (TILE, dim)),
        head_major(v, (TILE, value_dim)), head_major(v, (BLOCK, value_dim)), head_major(y, (rows, value_dim)),
        denominator, neighbours, tables.across_blocks, tables.across_tiles, documents and documents.start,
        source, *source.stride()[:3], since_desc, q_half_desc, first_half_desc, second_half_desc, normalizer_desc,
        state_share, length, neighbours.shape[-1], heads, chunk, state_count,
        GROUP=heads // near.shape[2], D=dim, E=value_dim, WITH_STATE=states is not None,
        SECOND_COLUMN=second_column, DOCUMENTS=documents is not None, PRECISION=dot_precision(q.dtype), ROWS=rows,
        COLUMNS=TILE, BLOCK=BLOCK, STAGES=stages, num_warps=warps, num_stages=stages, **register_limit(registers),
        enable_fp_fusion=True,
    )  # fmt: skip
    return y, denominator, state_share
