"""Backward pass for p = 2 with a gate per rotated pair, for scores between tokens of different blocks.

With q scaled, w_i = Σ_j B_ij the denominator of a row, s_ij the decayed score, B_ij = s_ij^p, and
    dy'_i = dy_i / w_i,    δ_i = dy'_i · y_i,    W_ij = s_ij^(p−1) (dy'_i · v_j − δ_i),
the gradients are
    dv_j = Σ_i B_ij dy'_i,
    dq_im = p Σ_j W_ij exp((G_im − G_jm)/p) k_jm,    dk_jm = p Σ_i W_ij exp((G_im − G_jm)/p) q_im.
`query_gradient_kernel` visits the keys of its own tile and then those of earlier tiles, `key_gradient_kernel` the
queries of its own tile and then those of later tiles, so that the decay across the tiles between is a running product,
as in the forward pass. The contribution of a tile's decayed keys (or queries) is multiplied by this decay before it is
added. Results lack the decay from the start of the query's block to the query, or from the key to the end of its block:
`neighbours` applies it and adds the contributions within blocks.

The gates' gradient follows from q_im dq_im and k_jm dk_jm (`gate_gradient`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import Documents, dot_precision, split_program_id, wait_for_mma
from sympow.kernels.device_limits import register_limit
from sympow.kernels.launch import blocks_of, ceil_div, empty_aligned, head_major, launch
from sympow.kernels.pair_gates.decays import BLOCK, TILE, DecayTables
from sympow.kernels.pair_gates.forward import decay_columns, in_product_layout
from sympow.kernels.states.quadratic import ChunkStates


@triton.jit
def decay_to_blocks(across_blocks_ptr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """The decay from the start of a tile to the start of each row's block, (ROWS, D); KEYS: from the end of each row's
    block to the end of the tile. `across_blocks_ptr` points to the tile's first block."""
    row_block = (tl.arange(0, ROWS) // BLOCK)[:, None]
    decay = tl.full((ROWS, D), 1.0, tl.float32)
    for block in tl.range(0, ROWS // BLOCK, num_stages=1):
        across = tl.load(across_blocks_ptr + block * D + tl.arange(0, D))
        between = row_block < block if KEYS else row_block > block
        decay = tl.where(between, decay * across[None, :], decay)
    return decay


@triton.jit
def query_gradient_kernel(
    q_desc, near_desc, far_desc, v_desc, v_block_desc, dy_desc, minus_delta_ptr, neighbours_ptr, neighbour_weights_ptr,
    dq_ptr, across_blocks_ptr, across_tiles_ptr, document_start_ptr, q_ptr, q_stride_b, q_stride_t, q_stride_h,
    since_desc, since_ptr, first_half_desc, second_half_desc, normalizer_desc, state_share_ptr, length, padded,
    delta_padded, heads, chunk, state_count,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WITH_STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ_j W_ij k_j over the keys before each query's block, decayed to the start of that block, and W_ij within it."""
    tiles = tl.cdiv(length, ROWS)
    tile, sequence = split_program_id(tiles)
    tile = tiles - 1 - tile
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

    dq = tl.zeros((ROWS, D), tl.float32)
    boundary = first // chunk
    if WITH_STATE:
        if boundary > 0:
            # Σ_i q_i (dy' S_i − δ Z_i) with queries that have decayed since the start of the chunk, as in
            # `attention.backward`; then the sum decays from there to the start of the tile.
            other = tl.zeros_like(dq)
            state_index = (kv_sequence * state_count + boundary - 1).to(tl.int32)
            pointers = q_ptr + batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            pointers += tl.minimum(rows, length - 1).to(tl.int64) * q_stride_t
            dy_left = dy_desc.load([batch, head, first, 0]).reshape(ROWS, E)
            for half in tl.static_range(2):
                for i in tl.range(0, D // 2, 2):
                    even = tl.load(pointers + half * (D // 2) + i)
                    odd = tl.load(pointers + half * (D // 2) + i + 1)
                    if half == 0:
                        kv_even = first_half_desc.load([state_index, i, 0, 0]).reshape(E, D)
                        kv_odd = first_half_desc.load([state_index, i + 1, 0, 0]).reshape(E, D)
                    else:
                        kv_even = second_half_desc.load([state_index, i, 0, 0]).reshape(E, D)
                        kv_odd = second_half_desc.load([state_index, i + 1, 0, 0]).reshape(E, D)
                    dq = tl.dot(dy_left * even[:, None], kv_even, dq, input_precision=PRECISION)
                    other = wait_for_mma(tl.dot(dy_left * odd[:, None], kv_odd, other, input_precision=PRECISION))
            normalizer = normalizer_desc.load([state_index, 0, 0]).reshape(D, D)
            queries = since_desc.load([batch, head, first, 0]).reshape(ROWS, D)
            delta = tl.load(minus_delta_ptr + sequence * delta_padded + rows)
            dq += other + tl.dot(queries, normalizer, input_precision=PRECISION) * delta[:, None]
            state_share = tl.load(state_share_ptr + sequence * length + rows, mask=rows < length, other=0.0)
            decay = tl.load(since_ptr + (kv_sequence * (padded // COLUMNS) + first // COLUMNS) * D + entries)
            dq = tl.where((state_share == 0)[:, None], 0.0, dq) * decay[None, :]

    since = decay_to_blocks(across_blocks_ptr, ROWS, D, BLOCK, False)
    q = in_product_layout(q_desc.load([batch, head, first, 0]).reshape(ROWS, D), D, PRECISION)
    q = (q * since).to(q.dtype)
    dy = dy_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    minus_delta = tl.load(minus_delta_ptr + sequence * delta_padded + rows)

    begin = boundary * chunk
    if DOCUMENTS:
        begin = tl.maximum(begin, tl.load(document_start_ptr + first) // COLUMNS * COLUMNS)
    between = tl.full((D,), 1.0, tl.float32)
    for step in tl.range(0, (first - begin) // COLUMNS, num_stages=STAGES):
        start = first - (step + 1) * COLUMNS
        k = far_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        score = tl.dot(decay_columns(q, between), k.T, input_precision=PRECISION)
        dp = tl.dot(dy, v.T, input_precision=PRECISION) + minus_delta[:, None]
        product = wait_for_mma(tl.dot((score * dp).to(k.dtype), k, input_precision=PRECISION))
        dq += product * between[None, :]
        between *= tl.load(across_tiles_ptr + start // COLUMNS * D + entries)

    dq *= decay_to_blocks(across_blocks_ptr, ROWS, D, BLOCK, False)
    q = in_product_layout(q_desc.load([batch, head, first, 0]).reshape(ROWS, D), D, PRECISION)
    places_in_block = tl.arange(0, BLOCK)
    neighbours_ptr += sequence * BLOCK * padded
    neighbours = tl.load(neighbours_ptr + places_in_block[None, :] * padded + rows[:, None])
    weights = tl.zeros((ROWS, BLOCK), tl.float32)
    since = tl.full((ROWS, D), 1.0, tl.float32)
    for step in tl.range(0, ROWS // BLOCK, num_stages=2):
        block = ROWS // BLOCK - 1 - step
        start = first + block * BLOCK
        k = near_desc.load([batch, kv_head, start, 0]).reshape(BLOCK, D)
        v = v_block_desc.load([batch, kv_head, start, 0]).reshape(BLOCK, E)
        score = tl.dot((q * since).to(q.dtype), k.T, input_precision=PRECISION)
        dp = tl.dot(dy, v.T, input_precision=PRECISION) + minus_delta[:, None]
        weights = tl.where(row_block == block, neighbours * dp, weights)
        score = tl.where(row_block > block, score, 0.0)
        dq += since * wait_for_mma(tl.dot((score * dp).to(k.dtype), k, input_precision=PRECISION))
        across = tl.load(across_blocks_ptr + block * D + entries)
        since = tl.where(row_block > block, since * across[None, :], since)

    neighbour_weights_ptr += sequence * BLOCK * padded
    tl.store(neighbour_weights_ptr + places_in_block[None, :] * padded + rows[:, None], weights)
    target = dq_ptr + (sequence * length + rows.to(tl.int64)[:, None]) * D + entries[None, :]
    tl.store(target, dq, mask=(rows < length)[:, None])


@triton.jit
def _visit_queries(
    dk, dv, between, k, v, far_desc, dy_desc, minus_delta_ptr, across_tiles_ptr, batch, kv_head, sequence,
    delta_padded, first, tiles,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv plus the contributions of `tiles` tiles of queries from `first` on, all after the keys; and `between`,
    the decay from the end of the keys' tile to the start of the next tile to visit."""
    offsets = tl.arange(0, COLUMNS)
    entries = tl.arange(0, D)
    for step in tl.range(0, GROUP * tiles, num_stages=STAGES):
        # All heads of a tile of queries, then the next tile.
        if GROUP == 1:
            tile, member = step, 0
        else:
            tile, member = step // GROUP, step % GROUP
        start = first + tile * COLUMNS
        head = kv_head * GROUP + member
        q = far_desc.load([batch, head, start, 0]).reshape(COLUMNS, D)
        dy = dy_desc.load([batch, head, start, 0]).reshape(COLUMNS, E)
        minus_delta = tl.load(minus_delta_ptr + (sequence + member) * delta_padded + start + offsets)
        score = tl.dot(decay_columns(k, between), q.T, input_precision=PRECISION)
        dp = tl.dot(v, dy.T, input_precision=PRECISION) + minus_delta[None, :]
        dv = tl.dot((score * score).to(dy.dtype), dy, dv, input_precision=PRECISION)
        product = wait_for_mma(tl.dot((score * dp).to(q.dtype), q, input_precision=PRECISION))
        dk += product * between[None, :]
        across = tl.load(across_tiles_ptr + start // COLUMNS * D + entries)
        between *= across if GROUP == 1 else tl.where(member == GROUP - 1, across, 1.0)
    return dk, dv, between


@triton.jit
def key_gradient_kernel(
    near_desc, v_desc, far_desc, dy_desc, q_block_desc, dy_block_desc, minus_delta_ptr, neighbours_ptr, dk_ptr, dv_desc,
    crossing_ptr, across_blocks_ptr, across_tiles_ptr, document_end_ptr, k_ptr, k_stride_b, k_stride_t, k_stride_h,
    until_desc, until_ptr, first_half_desc, second_half_desc, normalizer_desc, length, padded, delta_padded, kv_heads,
    chunk, state_count, spacing,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WITH_STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
    CROSSING: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dv_j for a tile of keys (rows here; queries are columns), and Σ_i W_ij q_i over the queries after each key's
    block, decayed from the end of that block; both summed over the query heads that read them.

    CROSSING: also Σ_j k_jm Σ_i W_ij exp((G_im − G_jm)/p) q_im over the keys of the tile and, block of `spacing` tokens
    by block, the queries after it.
    """
    tiles = tl.cdiv(length, ROWS)
    tile, kv_sequence = split_program_id(tiles)
    batch, kv_head = (kv_sequence // kv_heads).to(tl.int32), (kv_sequence % kv_heads).to(tl.int32)
    first = tile * ROWS
    places = tl.arange(0, ROWS)
    row_block = (places // BLOCK)[:, None]
    rows = first + places
    entries = tl.arange(0, D)
    across_blocks_ptr += (kv_sequence * (padded // BLOCK) + first // BLOCK) * D
    across_tiles_ptr += kv_sequence * (padded // COLUMNS) * D
    sequence = kv_sequence * GROUP
    after = first + ROWS

    dk = tl.zeros((ROWS, D), tl.float32)
    dv = tl.zeros((ROWS, E), tl.float32)
    boundary = first // chunk + 1
    if WITH_STATE:
        if boundary <= state_count:
            # dv = Σ_i (k * k_i) D_iᵀ and dk = Σ_i (v * k_i) D_i + k Z' with keys that have decayed to the end of the
            # chunk, as in `attention.backward`; then dk decays from the end of the tile to there.
            state_index = (kv_sequence * state_count + boundary - 1).to(tl.int32)
            pointers = k_ptr + batch.to(tl.int64) * k_stride_b + kv_head.to(tl.int64) * k_stride_h
            pointers += tl.minimum(rows, length - 1).to(tl.int64) * k_stride_t
            k_left = until_desc.load([batch, kv_head, first, 0]).reshape(ROWS, D)
            v_left = v_desc.load([batch, kv_head, first, 0]).reshape(ROWS, E)
            for half in tl.static_range(2):
                for i in tl.range(0, D // 2):
                    entry = tl.load(pointers + half * (D // 2) + i)
                    if half == 0:
                        dkv = first_half_desc.load([state_index, i, 0, 0]).reshape(E, D)
                    else:
                        dkv = second_half_desc.load([state_index, i, 0, 0]).reshape(E, D)
                    dv = tl.dot(k_left * entry[:, None], dkv.T, dv, input_precision=PRECISION)
                    dk = wait_for_mma(tl.dot(v_left * entry[:, None], dkv, dk, input_precision=PRECISION))
            normalizer = normalizer_desc.load([state_index, 0, 0]).reshape(D, D)
            keys = until_desc.load([batch, kv_head, first, 0]).reshape(ROWS, D)
            dk = wait_for_mma(tl.dot(keys, normalizer, dk, input_precision=PRECISION))
            dk *= tl.load(until_ptr + (kv_sequence * (padded // COLUMNS) + after // COLUMNS - 1) * D + entries)[None, :]

    until = decay_to_blocks(across_blocks_ptr, ROWS, D, BLOCK, True)
    k = in_product_layout(near_desc.load([batch, kv_head, first, 0]).reshape(ROWS, D), D, PRECISION)
    k = (k * until).to(k.dtype)
    v = v_desc.load([batch, kv_head, first, 0]).reshape(ROWS, E)

    end = tl.minimum(boundary * chunk, length)
    if DOCUMENTS:
        end = tl.minimum(end, tl.load(document_end_ptr + tl.minimum(after, length) - 1))
    between = tl.full((D,), 1.0, tl.float32)
    if CROSSING:
        # As in the other branch, but the contribution of each block of `spacing` queries to Σ k dk is stored.
        known = tl.zeros((D,), tl.float32)
        blocks = tl.cdiv(end, spacing)
        for index in tl.range(tl.where(after < end, after // spacing, blocks), blocks):
            start = tl.maximum(after, index * spacing)
            dk, dv, between = _visit_queries(
                dk, dv, between, k, v, far_desc, dy_desc, minus_delta_ptr, across_tiles_ptr, batch, kv_head, sequence,
                delta_padded, start, tl.cdiv(tl.minimum(end, (index + 1) * spacing) - start, COLUMNS),
                GROUP, D, E, PRECISION, COLUMNS, STAGES,
            )  # fmt: skip
            total = tl.sum(dk * k.to(tl.float32), axis=0)
            target = crossing_ptr + ((kv_sequence * tl.cdiv(length, spacing) + index) * tiles + tile) * D
            tl.store(target + entries, total - known)
            known = total
    else:
        count = tl.maximum(tl.cdiv(end - after, COLUMNS), 0)
        dk, dv, between = _visit_queries(
            dk, dv, between, k, v, far_desc, dy_desc, minus_delta_ptr, across_tiles_ptr, batch, kv_head, sequence,
            delta_padded, after, count, GROUP, D, E, PRECISION, COLUMNS, STAGES,
        )  # fmt: skip

    dk *= decay_to_blocks(across_blocks_ptr, ROWS, D, BLOCK, True)
    k = in_product_layout(near_desc.load([batch, kv_head, first, 0]).reshape(ROWS, D), D, PRECISION)
    places_in_block = tl.arange(0, BLOCK)
    until = tl.full((ROWS, D), 1.0, tl.float32)
    for step in tl.range(0, GROUP * (ROWS // BLOCK), num_stages=2):
        if GROUP == 1:
            block, member = step, 0
        else:
            block, member = step // GROUP, step % GROUP
        head = kv_head * GROUP + member
        start = first + block * BLOCK
        q = q_block_desc.load([batch, head, start, 0]).reshape(BLOCK, D)
        dy = dy_block_desc.load([batch, head, start, 0]).reshape(BLOCK, E)
        minus_delta = tl.load(minus_delta_ptr + (sequence + member) * delta_padded + start + places_in_block)
        # Indexed by the key's position in its block, then by the query.
        within = neighbours_ptr + (sequence + member) * BLOCK * padded + (places % BLOCK)[:, None] * padded
        neighbours = tl.load(within + (start + places_in_block)[None, :])
        score = tl.dot((k * until).to(k.dtype), q.T, input_precision=PRECISION)
        dp = tl.dot(v, dy.T, input_precision=PRECISION) + minus_delta[None, :]
        score = tl.where(row_block < block, score, 0.0)
        all_scores = tl.where(row_block == block, neighbours, score)
        dv = tl.dot((all_scores * all_scores).to(dy.dtype), dy, dv, input_precision=PRECISION)
        dk += until * wait_for_mma(tl.dot((score * dp).to(q.dtype), q, input_precision=PRECISION))
        if member == GROUP - 1:
            across = tl.load(across_blocks_ptr + block * D + entries)
            until = tl.where(row_block < block, until * across[None, :], until)

    target = dk_ptr + (kv_sequence * length + rows.to(tl.int64)[:, None]) * D + entries[None, :]
    tl.store(target, dk, mask=(rows < length)[:, None])
    dv_desc.store([batch, kv_head, first, 0], dv.to(dv_desc.dtype).reshape(1, 1, ROWS, E))


class QueryStates(NamedTuple):
    """The states, and what queries need to read them, in the chunked form.

    Attributes:
        states: at the boundaries between chunks, with all d² features.
        tokens: queries, scaled and decayed from the start of their chunk, (b, t, h, d).
        decay: decays from the start of a chunk to that of each of its tiles, (b, h_kv, tiles, d) float32.
        state_share: φ(q_i) Z, as `forward.attend` returns it.
    """

    states: ChunkStates
    tokens: Tensor
    decay: Tensor
    state_share: Tensor


class KeyStates(NamedTuple):
    """The gradients of the states, and what keys need to read them, in the chunked form.

    Attributes:
        states: the gradients, with all d² features.
        tokens: keys, decayed to the end of their chunk, (b, t, h_kv, d).
        decay: decays from the end of a tile to that of its chunk, (b, h_kv, tiles, d) float32.
    """

    states: ChunkStates
    tokens: Tensor
    decay: Tensor


def _state_arguments(x: Tensor, chunked: QueryStates | KeyStates | None, rows: int, length: int) -> tuple:
    """Arguments of both kernels: the tokens that read states, their strides, their descriptor and decays, and
    descriptors of the states; and the chunk size and the number of states."""
    if chunked is None:
        return (x, *x.stride()[:3], None, None, None, None, None), (2 * length + 4096, 0)
    states, tokens, decay = chunked[:3]
    value_dim, dim = states.first_half.shape[-2:]
    assert states.chunk % rows == 0
    descriptors = (
        blocks_of(states.first_half.flatten(0, 2), [1, 1, value_dim, dim]),
        blocks_of(states.second_half.flatten(0, 2), [1, 1, value_dim, dim]),
        blocks_of(states.normalizer.flatten(0, 2), [1, dim, dim]),
    )
    read = (tokens, *tokens.stride()[:3], head_major(tokens, (rows, dim)), decay, *descriptors)
    return read, (states.chunk, states.count)


def query_gradient(
    q: Tensor, near: Tensor, far: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, neighbours: Tensor,
    tables: DecayTables,
    *, chunked: QueryStates | None = None, documents: Documents | None = None, rows: int = 64, warps: int = 4,
    stages: int = 2, registers: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ_j W_ij k_j over the keys of earlier blocks, decayed to the start of the query's block, (b, h, t, d) float32;
    and W_ij within blocks, laid out as `neighbours`.

    Args:
        q, near, far, neighbours, documents: as in `forward.attend`.
        dy, minus_delta: dy' and −δ from `attention.backward.prepare`.
        chunked: the states of the chunked form; None: all tokens are in one chunk.
    """
    batch, length, heads, dim = q.shape
    value_dim = v.shape[-1]
    state = _state_arguments(q, chunked, rows, length)
    dq = q.new_empty(batch, heads, length, dim, dtype=torch.float32)
    weights = torch.empty_like(neighbours)
    launch(
        query_gradient_kernel, (ceil_div(length, rows) * batch * heads,),
        head_major(q, (rows, dim)), head_major(near, (BLOCK, dim)), head_major(far, (TILE, dim)),
        head_major(v, (TILE, value_dim)), head_major(v, (BLOCK, value_dim)), head_major(dy, (rows, value_dim)),
        minus_delta, neighbours, weights, dq, tables.across_blocks, tables.across_tiles,
        documents and documents.start, *state[0], chunked and chunked.state_share, length, neighbours.shape[-1],
        minus_delta.shape[-1], heads, *state[1],
        GROUP=heads // near.shape[2], D=dim, E=value_dim, WITH_STATE=chunked is not None,
        DOCUMENTS=documents is not None, PRECISION=dot_precision(q.dtype), ROWS=rows, COLUMNS=TILE, BLOCK=BLOCK,
        STAGES=stages, num_warps=warps, num_stages=stages, **register_limit(registers), enable_fp_fusion=True,
    )  # fmt: skip
    return dq, weights


def key_gradient(
    near: Tensor, v: Tensor, q_near: Tensor, q_far: Tensor, dy: Tensor, minus_delta: Tensor, neighbours: Tensor,
    tables: DecayTables,
    *, chunked: KeyStates | None = None, documents: Documents | None = None, spacing: int = 0, rows: int = 64,
    warps: int = 4, stages: int = 2, registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Σ_i W_ij q_i over the queries of later blocks, decayed from the end of the key's block, (b, h_kv, t, d) float32;
    dv (b, t, h_kv, e); and with `spacing` the crossing terms.

    Args:
        near: keys, decayed to the end of their block.
        q_near, q_far: queries, scaled and decayed from the start of their block and of their tile.
        dy, minus_delta, neighbours, documents: as in `query_gradient`.
        chunked: the gradients of the states of the chunked form; None: all tokens are in one chunk.
        spacing: tokens per block of queries for the crossing terms, a multiple of `rows`; 0: no crossing terms. These
            are the contributions of each block of queries to Σ k_jm dk_jm / p over the keys of each earlier tile of
            `rows` tokens, (b, h_kv, blocks, tiles, d) float32, 0 for later tiles.
    """
    batch, length, kv_heads, dim = near.shape
    value_dim = v.shape[-1]
    assert spacing % rows == 0
    state = _state_arguments(near, chunked, rows, length)
    dk = near.new_empty(batch, kv_heads, length, dim, dtype=torch.float32)
    dv = empty_aligned(v, *v.shape)
    tiles = ceil_div(length, rows)
    crossing = None
    if spacing:
        crossing = near.new_zeros(batch, kv_heads, ceil_div(length, spacing), tiles, dim, dtype=torch.float32)
    launch(
        key_gradient_kernel, (tiles * batch * kv_heads,),
        head_major(near, (rows, dim)), head_major(v, (rows, value_dim)), head_major(q_far, (TILE, dim)),
        head_major(dy, (TILE, value_dim)), head_major(q_near, (BLOCK, dim)), head_major(dy, (BLOCK, value_dim)),
        minus_delta, neighbours, dk, head_major(dv, (rows, value_dim)), crossing, tables.across_blocks,
        tables.across_tiles, documents and documents.end, *state[0], length, neighbours.shape[-1],
        minus_delta.shape[-1], kv_heads, *state[1], spacing,
        GROUP=q_near.shape[2] // kv_heads, D=dim, E=value_dim, WITH_STATE=chunked is not None,
        DOCUMENTS=documents is not None, CROSSING=crossing is not None, PRECISION=dot_precision(near.dtype), ROWS=rows,
        COLUMNS=TILE, BLOCK=BLOCK, STAGES=stages, num_warps=warps, num_stages=stages, **register_limit(registers),
        enable_fp_fusion=True,
    )  # fmt: skip
    return dk, dv, crossing
