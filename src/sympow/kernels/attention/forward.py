"""Forward pass of the attention form, and of the chunked form once the states are known.

y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij,   B_ij = exp(G_i − G_j) (q_i · k_j)^p.

A CTA owns a tile of queries that starts at row r and visits, in this order,
1. the state at the start of its chunk (chunked form, p = 2): Σ_a Σ_i q_i q_a S_ia = Σ_i (q * q_i) S_i, one matrix
   product for each entry i of the query, its left operand computed in registers;
2. the keys of its chunk before r: scores to the p-th power times exp(G_r − G_j), one factor per column;
3. the keys of its own tile, where exp(G_i − G_j) is formed for each element.
Between 2 and 3 the sums are multiplied by exp(G_i − G_r) per row. No exponent is ever positive.

The weight that a query gives to the state, φ(q) Z = Σ_ia q_i q_a Z_ia, is a sum of terms of both signs. Where it is
smaller than the rounding of Z could make it, dividing by it could give outputs of any size. Such a query does not see
the state: φ(q) S, φ(q) Z and their gradients count as zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import (
    EPSILON,
    HALF_STATE_EPSILON,
    STATE_EPSILON,
    Documents,
    dot_precision,
    even_power,
    or_one,
    pairwise_decay,
    partial_row_sums,
    power_of_two_scale,
    round_to,
    split_program_id,
    split_sum,
    wait_for_mma,
)
from sympow.kernels.device_limits import register_limit
from sympow.kernels.float16_range import (
    KV_SCALE,
    NORMALIZER_SCALE,
    SCALES,
    WEIGHT_LIMIT,
    KeyRange,
    exponent_to_limit,
    exponents,
    is_lost,
    log_length,
    power_of_two,
)
from sympow.kernels.launch import block_dim, blocks_of, ceil_div, empty_aligned, flat_grid, head_major, launch
from sympow.kernels.running_sums import Gates
from sympow.kernels.states.quadratic import ChunkStates, sum_at


@triton.jit
def query_normalizer(q, normalizer, PRECISION: tl.constexpr):
    """φ(q) Z of a tile of queries, and the rows where it is indistinguishable from rounding."""
    found = tl.sum(tl.dot(q, normalizer, input_precision=PRECISION) * q.to(tl.float32), axis=1)
    size = tl.abs(q)
    most = tl.sum(tl.dot(size, tl.abs(normalizer), input_precision=PRECISION) * size.to(tl.float32), axis=1)
    half_epsilon = STATE_EPSILON if q.dtype == tl.bfloat16 else HALF_STATE_EPSILON
    epsilon = EPSILON if q.dtype == tl.float32 else half_epsilon
    # A comparison with NaN is false, so that NaN stays visible.
    return found, found < most * epsilon


@triton.jit
def read_state(
    acc, q, q_first_half, q_second_half, q_ptr, scale, rows, length, stride_t, first_half_desc, second_half_desc,
    normalizer_desc, state_index, D: tl.constexpr, E: tl.constexpr, SECOND_HALF: tl.constexpr,
    SECOND_COLUMN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """φ(q) S, added to acc = 0, and φ(q) Z; q_first_half and q_second_half are the two halves of q, not yet scaled.

    S is symmetric in its two feature indices (i, a), so the block with i in the upper and a in the lower half is not
    read: its mirror image counts twice.
    """
    HALF_DIM: tl.constexpr = D // 2
    normalizer = normalizer_desc.load([state_index, 0, 0]).reshape(D, D)
    found, unseen = query_normalizer(q, normalizer, PRECISION)
    scale = scale.to(q_first_half.dtype)
    q_first_half, q_second_half = q_first_half * scale[:, None], q_second_half * scale[:, None]
    # Two accumulators, so that one product runs while the operand of the other is computed; waiting for the second
    # waits for both. Entries of q are loaded one step ahead, from rows clamped to the sequence: results of rows past
    # its end are never stored.
    other = tl.zeros_like(acc)
    pointers = q_ptr + tl.minimum(rows, length - 1).to(tl.int64) * stride_t
    ahead = tl.load(pointers)
    for i in tl.range(0, HALF_DIM):
        entry = ahead * scale
        ahead = tl.load(pointers + i + 1)
        kv_first_half = first_half_desc.load([state_index, i, 0, 0]).reshape(E, HALF_DIM)
        kv_second_half = first_half_desc.load([state_index, i, 0, HALF_DIM]).reshape(E, HALF_DIM)
        acc = tl.dot(q_first_half * entry[:, None], kv_first_half.T, acc, input_precision=PRECISION)
        other = wait_for_mma(
            tl.dot(q_second_half * (entry * 2)[:, None], kv_second_half.T, other, input_precision=PRECISION)
        )
    even, odd = ahead, tl.load(pointers + HALF_DIM + 1)
    for i in tl.range(0, SECOND_HALF, 2):
        even_scaled, odd_scaled = even * scale, odd * scale
        next_pair = pointers + tl.minimum(HALF_DIM + i + 2, D - 2)
        even, odd = tl.load(next_pair), tl.load(next_pair + 1)
        kv_even = second_half_desc.load([state_index, i, 0, SECOND_COLUMN]).reshape(E, HALF_DIM)
        kv_odd = second_half_desc.load([state_index, i + 1, 0, SECOND_COLUMN]).reshape(E, HALF_DIM)
        acc = tl.dot(q_second_half * even_scaled[:, None], kv_even.T, acc, input_precision=PRECISION)
        other = wait_for_mma(tl.dot(q_second_half * odd_scaled[:, None], kv_odd.T, other, input_precision=PRECISION))
    acc += other
    return tl.where(unseen[:, None], 0.0, acc), tl.where(unseen, 0.0, found)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, y_desc, denominator_ptr, gate_sums_ptr, to_end_ptr,
    q_ptr, q_stride_b, q_stride_t, q_stride_h, q_half_desc, first_half_desc, second_half_desc, normalizer_desc,
    state_share_ptr, bound_ptr, state_scale_ptr, document_start_ptr, length, padded_length, heads, chunk, state_count,
    first_boundary, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr,
    WITH_STATE: tl.constexpr, DOCUMENTS: tl.constexpr, SECOND_HALF: tl.constexpr, SECOND_COLUMN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    FLOAT16: tl.constexpr = False,
):  # fmt: skip
    """y_i for a tile of queries, their denominators Σ_j B_ij, and φ(q_i) Z of the chunk's state without further decay.

    FLOAT16: inputs are float16. Rows are scaled once more, by 2^exponent up to the diagonal and differently on it, so
    that no weight leaves the range (`float16_range`).
    """
    tiles = tl.cdiv(length, ROWS)
    order, sequence = split_program_id(tiles, tl.int32)
    tile = tiles - 1 - order  # tiles with the most keys start first
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        to_end_ptr += kv_sequence.to(tl.int64) * padded_length

    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    scale = power_of_two_scale(q)
    q_length = log_length(q) + tl.log2(scale) if FLOAT16 else scale
    q = (q * scale[:, None]).to(q_desc.dtype)
    acc = tl.zeros((ROWS, E), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)

    boundary = first // chunk
    chunk_start = boundary * chunk
    document_start = tl.load(document_start_ptr + first) if DOCUMENTS else 0
    if GATED:
        reference = tl.load(gate_sums_ptr + first)

    if WITH_STATE:
        state_share_ptr += sequence.to(tl.int64) * length
        # A document that began in this chunk is not in the state.
        if (boundary >= first_boundary) & (document_start <= chunk_start):
            # Loaded again, because they are needed in another register layout than q.
            q_first_half = q_half_desc.load([batch, head, first, 0]).reshape(ROWS, D // 2)
            q_second_half = q_half_desc.load([batch, head, first, D // 2]).reshape(ROWS, D // 2)
            entries = q_ptr + batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            acc, denominator = read_state(
                acc, q, q_first_half, q_second_half, entries, scale, rows, length, q_stride_t, first_half_desc,
                second_half_desc, normalizer_desc, kv_sequence * state_count + boundary - first_boundary, D, E,
                SECOND_HALF, SECOND_COLUMN, PRECISION,
            )  # fmt: skip
            tl.store(state_share_ptr + rows, denominator, mask=rows < length)
            kv_factor, normalizer_factor = 1.0, 1.0
            if FLOAT16:
                state_scale_ptr += kv_sequence * SCALES
                kv_factor /= tl.load(state_scale_ptr + KV_SCALE)
                normalizer_factor /= tl.load(state_scale_ptr + NORMALIZER_SCALE)
            if GATED:
                since_state = tl.exp((reference - sum_at(gate_sums_ptr, boundary, chunk, length)).to(tl.float32))
                kv_factor *= since_state
                normalizer_factor *= since_state
            if FLOAT16 or GATED:
                acc *= kv_factor
                denominator *= normalizer_factor

    change = tl.zeros((ROWS,), tl.float32)
    if FLOAT16:
        bound_ptr += kv_sequence.to(tl.int64) * length
        own_bound = tl.load(bound_ptr + tl.minimum(rows, length - 1))
        exponent, change = exponents(q_length, tl.load(bound_ptr + first), own_bound, WEIGHT_LIMIT, POWER)
        change *= POWER
        if WITH_STATE:
            # Loaded again: it would take registers while the state is queried.
            q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
            q = (q * (scale * power_of_two(exponent))[:, None]).to(q_desc.dtype)
            acc *= power_of_two(exponent * POWER)[:, None]
            denominator *= power_of_two(exponent * POWER)
        else:
            q = (q * power_of_two(exponent)[:, None]).to(q_desc.dtype)
    if DOCUMENTS:
        # Closed gates between documents make these tiles zero, so they are skipped.
        chunk_start = tl.maximum(chunk_start, document_start // COLUMNS * COLUMNS)
    if GATED:
        # Loaded one tile ahead into registers: through shared memory they would cost a barrier per tile.
        to_tile_end = tl.load(to_end_ptr + chunk_start + tl.arange(0, COLUMNS))
        tile_end = tl.load(gate_sums_ptr + tl.minimum(chunk_start + COLUMNS, length) - 1)
    partial_sums = tl.zeros((ROWS, 4), tl.float32)
    for start in tl.range(chunk_start, first, COLUMNS, num_stages=STAGES):
        k = k_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        scores = even_power(tl.dot(q, k.T, input_precision=PRECISION), POWER)
        if GATED:
            column_decay = to_tile_end * tl.exp((reference - tile_end).to(tl.float32))
            scores *= column_decay[None, :]
            to_tile_end = tl.load(to_end_ptr + start + COLUMNS + tl.arange(0, COLUMNS))
            tile_end = tl.load(gate_sums_ptr + tl.minimum(start + 2 * COLUMNS, length) - 1)
        partial_sums += partial_row_sums(scores, ROWS, COLUMNS)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        acc = tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION)
    denominator += tl.sum(partial_sums, axis=1)

    if GATED:
        row_whole, row_rest = split_sum(tl.load(gate_sums_ptr + tl.minimum(rows, length - 1)), reference)
        row_decay = tl.exp2((row_whole + change) + row_rest)
        acc *= row_decay[:, None]
        denominator *= row_decay
        row_whole += change
    elif FLOAT16:
        acc *= power_of_two(change)[:, None]
        denominator *= power_of_two(change)

    exact, earlier = denominator, denominator
    LIFTED: tl.constexpr = FLOAT16 and POWER > 2
    lift = tl.zeros((ROWS,), tl.float32)
    # Not pipelined: the loop above would lose the registers.
    for start in tl.range(first, first + ROWS, COLUMNS, num_stages=1):
        columns = start + tl.arange(0, COLUMNS)
        k = k_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        scores = even_power(tl.dot(q, k.T, input_precision=PRECISION), POWER)
        causal = rows[:, None] >= columns[None, :]
        if GATED:
            column_sums = tl.load(gate_sums_ptr + tl.minimum(columns, length - 1))
            column_whole, column_rest = split_sum(column_sums, reference)
            scores *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
        else:
            if FLOAT16:
                scores *= power_of_two(change)[:, None]
            scores = tl.where(causal, scores, 0.0)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        # Weights are summed as rounded for the product: then a row that sees one key returns its value exactly, and the
        # gradient of its score is exactly zero, however small the score.
        if FLOAT16:
            # The weights that are returned are exact: rounding is absolute below the normal numbers of float16.
            exact += tl.sum(scores, axis=1)
        if LIFTED:
            # The first rows of a document see few keys, perhaps all nearly orthogonal to the query.
            last_lift, lift = lift, exponent_to_limit(exact, WEIGHT_LIMIT)
            acc *= power_of_two(lift - last_lift)[:, None]
            denominator *= power_of_two(lift - last_lift)
            scores *= power_of_two(lift)[:, None]
        scores = round_to(scores, v.dtype)
        denominator += tl.sum(scores, axis=1)
        acc = tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION)

    divisor = or_one(denominator)
    lost = denominator == 0
    if LIFTED:
        lost = lost | is_lost(earlier, exact)
        divisor = tl.where(lost, float("inf"), divisor)
    y = acc / divisor[:, None]
    y_desc.store([batch, head, first, 0], y.to(y_desc.dtype).reshape(1, 1, ROWS, E))
    if FLOAT16:
        # A row whose weights were lost by rounding has no output, and must not have gradients of one.
        exact = tl.where(lost, 0.0, exact)
        denominator = exact * power_of_two(-exponent * POWER) * power_of_two(-change)
    tl.store(denominator_ptr + sequence.to(tl.int64) * length + rows, denominator, mask=rows < length)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    gates: Gates | None,
    states: ChunkStates | None = None,
    *,
    chunk: int = 0,
    documents: Documents | None = None,
    key_range: KeyRange | None = None,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
    rows: int = 128,
    columns: int = 64,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (b, t, h, e), the rows' denominators Σ_j B_ij (b, h, t) float32, and φ(q_i) Z of states (b, h, t) float32.

    Args:
        gates: from `gate_sums` with tiles of `columns` tokens, or None.
        states: the states at the chunk boundaries; a chunk is a multiple of `rows` tokens.
        chunk: without states, tokens per chunk, which sees no earlier one; 0: all in one.
        documents: where documents begin and end, between which `gates` must be closed; None: one document.
        key_range: of k and v, for float16; else None.
        out: tensors for the results: y with aligned rows (`common.aligned`), and the others contiguous, the last zero
            for chunks without a state; None: new tensors.
    """
    assert rows % columns == 0 and (gates is None or gates.tile == columns)
    batch, length, heads, dim = q.shape
    value_dim = v.shape[-1]
    d, e = block_dim(dim), block_dim(value_dim)
    state_share: Tensor | None = None
    if out is None:
        y = empty_aligned(v, batch, length, heads, value_dim)
        denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    else:
        y, denominator, state_share = out
    q_desc = head_major(q, (rows, d))
    q = q_desc.base.transpose(1, 2)
    if states is None:
        chunk, state_count, second_half, second_column, first_boundary = chunk or length + rows, 0, 0, 0, 0
        q_half_desc = first_half_desc = second_half_desc = normalizer_desc = None
    else:
        assert dim == d and value_dim == e and power == 2 and states.chunk % rows == 0
        chunk, state_count, first_boundary = states.chunk, states.count, states.first
        second_half, second_column = states.second_half.shape[3], states.second_half.shape[-1] - d // 2
        q_half_desc = head_major(q, (rows, d // 2))
        first_half_desc = blocks_of(states.first_half.flatten(0, 2), [1, 1, e, d // 2])
        second_half_desc = blocks_of(states.second_half.flatten(0, 2), [1, 1, e, d // 2])
        normalizer_desc = blocks_of(states.normalizer.flatten(0, 2), [1, d, d])
        state_share = torch.zeros_like(denominator) if state_share is None else state_share
    # In float16 fused multiply-add would keep weights and decays of the diagonal for the exact sums, and spill. (With
    # heads of 128 it is the other way round.)
    launch(
        forward_kernel, flat_grid(ceil_div(length, rows), batch * heads),
        q_desc, head_major(k, (columns, d)), head_major(v, (columns, e)), head_major(y, (rows, e)), denominator,
        gates and gates.sums, gates and gates.to_end, q, q.stride(0), q.stride(1), q.stride(2),
        q_half_desc, first_half_desc, second_half_desc, normalizer_desc, state_share,
        key_range and key_range.bound, key_range and key_range.scales, documents and documents.start,
        length, gates.to_end.shape[-1] if gates else 0, heads, chunk, state_count, first_boundary,
        GROUP=heads // k.shape[2], D=d, E=e, POWER=power, GATED=gates is not None, WITH_STATE=states is not None,
        DOCUMENTS=documents is not None, SECOND_HALF=second_half, SECOND_COLUMN=second_column,
        PRECISION=dot_precision(q.dtype), ROWS=rows, COLUMNS=columns, STAGES=stages, FLOAT16=key_range is not None,
        num_warps=warps, num_stages=stages, **register_limit(registers), enable_fp_fusion=key_range is None or d > 64,
    )  # fmt: skip
    return y, denominator, state_share
