"""Backward pass of the attention form, and of the chunked form once the states and their gradients are known.

With q scaled (`common.scale_queries`), w_i = Σ_j B_ij the denominator of a row, and
    dy'_i = dy_i / w_i,    δ_i = dy'_i · y_i,    dB_ij = dy'_i · v_j − δ_i,    T_ij = exp(G_i − G_j) (q_i · k_j)^(p−1),
the gradients are
    dv_j = Σ_i T_ij (q_i · k_j) dy'_i,    dk_j = p Σ_i T_ij dB_ij q_i,    dq_i = p Σ_j T_ij dB_ij k_j.
The gates' gradient follows from q_i · dq_i and k_j · dk_j alone (`running_sums.gate_gradient`), so no kernel
accumulates it.

Two kernels, each of which owns its outputs, so that results are bitwise reproducible: a CTA of `query_gradient_kernel`
owns a tile of queries and visits earlier keys, one of `key_gradient_kernel` owns a tile of keys and visits later
queries. Both compute the scores: seven matrix products in all. Decays are factored as in the forward pass, so that only
the diagonal tiles need one exponential per element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import (
    LOG2_E,
    Documents,
    divide_steps,
    dot_precision,
    odd_power,
    or_one,
    pairwise_decay,
    split_program_id,
    split_sum,
    wait_for_mma,
)
from sympow.kernels.device_limits import register_limit
from sympow.kernels.float16_range import (
    D_KV_SCALE,
    D_NORMALIZER_SCALE,
    GRADIENT_FACTOR,
    GRADIENT_SCALES,
    KEY_LENGTH,
    KV_SCALE,
    NORMALIZER_SCALE,
    SCALES,
    VALUE_FACTOR,
    KeyRange,
    RowGradients,
    power_of_two,
    query_exponents,
)
from sympow.kernels.launch import block_dim, blocks_of, ceil_div, empty_aligned, flat_grid, head_major, launch
from sympow.kernels.running_sums import Gates
from sympow.kernels.states.quadratic import ChunkStates, sum_at


@triton.jit
def prepare_kernel(
    y_desc, dy_desc, denominator_ptr, d_denominator_ptr, divided_desc, delta_ptr, length, padded, heads,
    D_DENOMINATOR: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dy' and −δ for a tile of rows; −δ is 0 past the last token. D_DENOMINATOR: −δ plus the gradient of the rows'
    denominators."""
    tile, sequence = split_program_id(padded // ROWS, tl.int32)
    first = tile * ROWS
    batch, head = sequence // heads, sequence % heads
    rows = first + tl.arange(0, ROWS)
    denominator = tl.load(denominator_ptr + sequence.to(tl.int64) * length + rows, mask=rows < length, other=1.0)
    dy = dy_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    divided = (dy / or_one(denominator)[:, None]).to(dy.dtype)
    divided_desc.store([batch, head, first, 0], divided.reshape(1, 1, ROWS, E))
    y = y_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    minus_delta = -tl.sum(divided.to(tl.float32) * y.to(tl.float32), axis=1)
    if D_DENOMINATOR:
        minus_delta += tl.load(d_denominator_ptr + sequence.to(tl.int64) * length + rows, mask=rows < length, other=0.0)
    tl.store(delta_ptr + sequence.to(tl.int64) * padded + rows, minus_delta)


@triton.jit
def query_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dq_desc, row_term_ptr, scale_ptr, gate_sums_ptr, to_end_ptr,
    q_ptr, q_stride_b, q_stride_t, q_stride_h, first_half_desc, second_half_desc, normalizer_desc, state_share_ptr,
    bound_ptr, q_length_ptr, factor_ptr, key_scales_ptr, scales_ptr,
    document_start_ptr, length, padded, gates_padded, heads, chunk, state_count, first_boundary,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SECOND_HALF: tl.constexpr, POWER: tl.constexpr,
    GATED: tl.constexpr, WITH_STATE: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, FLOAT16: tl.constexpr = False,
):  # fmt: skip
    """dq_i = p Σ_{j≤i} T_ij dB_ij k_j for a tile of queries, times the scale of the query, and q_i · dq_i.

    FLOAT16: inputs are float16, and rows have further scales, as in the forward pass (`float16_range`).
    """
    tiles = tl.cdiv(length, ROWS)
    order, sequence = split_program_id(tiles, tl.int32)
    tile = tiles - 1 - order  # tiles with the most keys start first
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    boundary = first // chunk
    chunk_start = boundary * chunk
    document_start = tl.load(document_start_ptr + first) if DOCUMENTS else 0
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        to_end_ptr += kv_sequence.to(tl.int64) * gates_padded
        reference = tl.load(gate_sums_ptr + first)

    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    dy = dy_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    minus_delta = tl.load(minus_delta_ptr + sequence.to(tl.int64) * padded + rows)
    dq = tl.zeros((ROWS, D), tl.float32)
    value_factor = 1.0
    if FLOAT16:
        value_factor = tl.load(scales_ptr + kv_sequence * GRADIENT_SCALES + VALUE_FACTOR)

    if WITH_STATE:
        if (boundary >= first_boundary) & (document_start <= chunk_start):
            # Σ_i q_i (dy' S_i − δ Z_i), left operand dy' * q_i in registers; two accumulators, as in the forward pass.
            other = tl.zeros_like(dq)
            state_index = kv_sequence * state_count + boundary - first_boundary
            pointers = q_ptr + batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            pointers += tl.minimum(rows, length - 1).to(tl.int64) * q_stride_t
            dy_left = dy_desc.load([batch, head, first, 0]).reshape(ROWS, E)
            for half in tl.static_range(2):
                for i in tl.range(0, D // 2 if half == 0 else SECOND_HALF, 2):
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
            from_normalizer = tl.dot(q, normalizer, input_precision=PRECISION) * minus_delta[:, None]
            if FLOAT16:
                key_scales_ptr += kv_sequence * SCALES
                dq = (dq + other) * (value_factor / tl.load(key_scales_ptr + KV_SCALE))
                dq += from_normalizer * (1.0 / tl.load(key_scales_ptr + NORMALIZER_SCALE))
            else:
                dq += other + from_normalizer
            state_share = tl.load(
                state_share_ptr + sequence.to(tl.int64) * length + rows, mask=rows < length, other=0.0
            )
            dq = tl.where((state_share == 0)[:, None], 0.0, dq)
            if GATED:
                dq *= tl.exp((reference - sum_at(gate_sums_ptr, boundary, chunk, length)).to(tl.float32))

    change = tl.zeros((ROWS,), tl.float32)
    row_factor = change
    if FLOAT16:
        bound_ptr += kv_sequence.to(tl.int64) * length
        own_bound = tl.load(bound_ptr + tl.minimum(rows, length - 1))
        q_length = tl.load(q_length_ptr + sequence.to(tl.int64) * padded + rows)
        log_decay = tl.zeros((ROWS,), tl.float32)
        if GATED:
            log_decay = ((reference - tl.load(gate_sums_ptr + tl.minimum(rows, length - 1))) * LOG2_E).to(tl.float32)
        key_length = tl.load(scales_ptr + kv_sequence * GRADIENT_SCALES + KEY_LENGTH)
        exponent, change = query_exponents(
            q_length, tl.load(bound_ptr + first), own_bound, key_length, log_decay, POWER
        )
        change *= POWER - 1
        # Not applied to q, which stays in shared memory, but to what its scores are multiplied by.
        row_scale = power_of_two(exponent * (POWER - 1)) / key_length
        row_factor = row_scale * value_factor
        minus_delta *= row_scale
        dq *= row_scale[:, None]
    if DOCUMENTS:
        chunk_start = tl.maximum(chunk_start, document_start // COLUMNS * COLUMNS)
    if GATED:
        to_tile_end = tl.load(to_end_ptr + chunk_start + tl.arange(0, COLUMNS))
        tile_end = tl.load(gate_sums_ptr + tl.minimum(chunk_start + COLUMNS, length) - 1)
    for start in tl.range(chunk_start, first, COLUMNS, num_stages=STAGES):
        k = k_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        score = tl.dot(q, k.T, input_precision=PRECISION)
        dp = _plus_delta(tl.dot(dy, v.T, input_precision=PRECISION), minus_delta[:, None], row_factor[:, None], FLOAT16)
        factor = odd_power(score, POWER - 1)
        if GATED:
            factor *= (to_tile_end * tl.exp((reference - tile_end).to(tl.float32)))[None, :]
            to_tile_end = tl.load(to_end_ptr + start + COLUMNS + tl.arange(0, COLUMNS))
            tile_end = tl.load(gate_sums_ptr + tl.minimum(start + 2 * COLUMNS, length) - 1)
        dq = tl.dot((factor * dp).to(k.dtype), k, dq, input_precision=PRECISION)

    if GATED:
        row_whole, row_rest = split_sum(tl.load(gate_sums_ptr + tl.minimum(rows, length - 1)), reference)
        row_whole += change
        dq *= tl.exp2(row_whole + row_rest)[:, None]
    elif FLOAT16:
        dq *= power_of_two(change)[:, None]
    # Not pipelined: no registers are left for it.
    for start in tl.range(first, first + ROWS, COLUMNS, num_stages=1):
        columns = start + tl.arange(0, COLUMNS)
        k = k_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        score = tl.dot(q, k.T, input_precision=PRECISION)
        dp = _plus_delta(tl.dot(dy, v.T, input_precision=PRECISION), minus_delta[:, None], row_factor[:, None], FLOAT16)
        factor = odd_power(score, POWER - 1)
        causal = rows[:, None] >= columns[None, :]
        if GATED:
            column_sums = tl.load(gate_sums_ptr + tl.minimum(columns, length - 1))
            column_whole, column_rest = split_sum(column_sums, reference)
            factor *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
        else:
            if FLOAT16:
                factor *= power_of_two(change)[:, None]
            factor = tl.where(causal, factor, 0.0)
        dq = tl.dot((factor * dp).to(k.dtype), k, dq, input_precision=PRECISION)

    dq *= POWER
    if FLOAT16:
        unscale = tl.load(factor_ptr + sequence.to(tl.int64) * padded + rows) * power_of_two(-change)
        dq *= (unscale / row_factor)[:, None]
    row_term = tl.sum(dq * q.to(tl.float32), axis=1)
    tl.store(row_term_ptr + sequence.to(tl.int64) * length + rows, row_term, mask=rows < length)
    dq *= tl.load(scale_ptr + sequence.to(tl.int64) * length + rows, mask=rows < length, other=0.0)[:, None]
    dq_desc.store([batch, head, first, 0], dq.to(dq_desc.dtype).reshape(1, 1, ROWS, D))


@triton.jit
def _plus_delta(products, minus_delta, value_factor, FLOAT16: tl.constexpr):
    """dy · v − δ; FLOAT16: times a factor that δ already has."""
    return products * value_factor + minus_delta if FLOAT16 else products + minus_delta


@triton.jit
def _visit_queries(
    dk, dv, k, v, q_desc, dy_desc, minus_delta_ptr, gate_sums_ptr, from_start_ptr, factor_ptr, reference, row_decay,
    value_factor, gradient_factor, batch, kv_head, sequence, padded, start, tiles,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POWER: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    FLOAT16: tl.constexpr,
):  # fmt: skip
    """dk and dv plus the contributions of `tiles` tiles of queries from `start` on, all after the keys."""
    offsets = tl.arange(0, COLUMNS)
    # Loaded one tile ahead into registers, as in the forward pass.
    next_delta = tl.load(minus_delta_ptr + sequence * padded + start + offsets)
    if GATED:
        next_decay = tl.load(from_start_ptr + start + offsets)
        next_sum = tl.load(gate_sums_ptr + start)
    if FLOAT16:
        next_factor = tl.load(factor_ptr + sequence * padded + start + offsets)
    for step in tl.range(0, GROUP * tiles, num_stages=STAGES):
        member, tile = divide_steps(step, tiles, GROUP)
        head = kv_head * GROUP + member
        q = q_desc.load([batch, head, start + tile * COLUMNS, 0]).reshape(COLUMNS, D)
        dy = dy_desc.load([batch, head, start + tile * COLUMNS, 0]).reshape(COLUMNS, E)
        score = tl.dot(k, q.T, input_precision=PRECISION)
        dp = _plus_delta(tl.dot(v, dy.T, input_precision=PRECISION), next_delta[None, :], value_factor, FLOAT16)
        factor = odd_power(score, POWER - 1)
        member, tile = divide_steps(tl.minimum(step + 1, GROUP * tiles - 1), tiles, GROUP)
        next_start = start + tile * COLUMNS
        next_delta = tl.load(minus_delta_ptr + (sequence + member) * padded + next_start + offsets)
        if FLOAT16:
            tile_factor = gradient_factor
            column_factor = next_factor
            next_factor = tl.load(factor_ptr + (sequence + member) * padded + next_start + offsets)
            if GATED:
                tile_factor *= tl.exp((next_sum - reference).to(tl.float32))
                column_factor *= next_decay
                # Not after the sums: with strong gates, weights counted from the end of the tile leave the range.
                factor *= row_decay[:, None]
            factor *= (column_factor * tile_factor)[None, :]
        elif GATED:
            factor *= (next_decay * tl.exp((next_sum - reference).to(tl.float32)))[None, :]
        if GATED:
            next_decay = tl.load(from_start_ptr + next_start + offsets)
            next_sum = tl.load(gate_sums_ptr + next_start)
        dv = tl.dot((factor * score).to(dy.dtype), dy, dv, input_precision=PRECISION)
        dk = tl.dot((factor * dp).to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dk_desc, dv_desc, column_term_ptr, gate_sums_ptr, from_start_ptr,
    k_ptr, k_stride_b, k_stride_t, k_stride_h, first_half_desc, second_half_desc, normalizer_desc, factor_ptr,
    scales_ptr, token_scale_ptr, document_end_ptr, block_terms_ptr,
    length, padded, gates_padded, kv_heads, chunk, state_count, first_boundary, query_block,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SECOND_HALF: tl.constexpr, POWER: tl.constexpr,
    GATED: tl.constexpr, WITH_STATE: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_TERMS: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    FLOAT16: tl.constexpr = False,
):  # fmt: skip
    """dv_j and dk_j for a tile of keys (rows here; queries are columns), summed over the query heads that read them,
    and k_j · dk_j. BLOCK_TERMS: also what each block of `query_block` queries adds to k_j · dk_j.

    FLOAT16: inputs are float16, dk and dv have a common factor until they are stored, and each query has one
    (`float16_range`).
    """
    key_tile, kv_sequence = split_program_id(tl.cdiv(length, ROWS), tl.int32)
    first = key_tile * ROWS
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    rows = first + tl.arange(0, ROWS)
    boundary = first // chunk + 1
    chunk_end = tl.minimum(boundary * chunk, length)
    last = tl.minimum(first + ROWS, length) - 1
    document_end = tl.load(document_end_ptr + last) if DOCUMENTS else length
    reference = 0.0
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        from_start_ptr += kv_sequence.to(tl.int64) * gates_padded
        reference = tl.load(gate_sums_ptr + last)

    k = k_desc.load([batch, kv_head, first, 0]).reshape(ROWS, D)
    v = v_desc.load([batch, kv_head, first, 0]).reshape(ROWS, E)
    dk = tl.zeros((ROWS, D), tl.float32)
    dv = tl.zeros((ROWS, E), tl.float32)
    row_decay = tl.full((ROWS,), 1.0, tl.float32)
    value_factor = 1.0
    gradient_factor = 1.0
    if FLOAT16:
        if GATED:
            row_sums = tl.load(gate_sums_ptr + tl.minimum(rows, length - 1))
            row_whole, row_rest = split_sum(row_sums, reference)
            row_decay = tl.exp2(-(row_whole + row_rest))
        scales_ptr += kv_sequence * GRADIENT_SCALES
        value_factor = tl.load(scales_ptr + VALUE_FACTOR)
        gradient_factor = tl.load(scales_ptr + GRADIENT_FACTOR)

    if WITH_STATE:
        # No query reads the state after a document that ends in this chunk.
        if (boundary - first_boundary < state_count) & (document_end >= chunk_end):
            # dv = Σ_i (k * k_i) D_iᵀ and dk = Σ_i (v * k_i) D_i + k Z', left operands computed in registers.
            state_index = kv_sequence * state_count + boundary - first_boundary
            pointers = k_ptr + batch.to(tl.int64) * k_stride_b + kv_head.to(tl.int64) * k_stride_h
            pointers += tl.minimum(rows, length - 1).to(tl.int64) * k_stride_t
            k_left = k_desc.load([batch, kv_head, first, 0]).reshape(ROWS, D)
            v_left = v_desc.load([batch, kv_head, first, 0]).reshape(ROWS, E)
            if FLOAT16:
                # Products of two entries of a key, or of one with a value, would leave the range. Their scales are
                # factors of the entry that varies, and loaded, not computed: from what is not loaded, Triton converts
                # the left operands to their layout in every iteration, through shared memory.
                of_tokens = token_scale_ptr + kv_sequence.to(tl.int64) * 2 * length + tl.minimum(rows, length - 1)
                k_scale, v_scale = tl.load(of_tokens), tl.load(of_tokens + length)
            for half in tl.static_range(2):
                for i in tl.range(0, D // 2 if half == 0 else SECOND_HALF):
                    entry = tl.load(pointers + half * (D // 2) + i)
                    if half == 0:
                        dkv = first_half_desc.load([state_index, i, 0, 0]).reshape(E, D)
                    else:
                        dkv = second_half_desc.load([state_index, i, 0, 0]).reshape(E, D)
                    for_dk = entry
                    if FLOAT16:
                        entry *= k_scale
                        for_dk = entry * v_scale
                        entry *= k_scale
                    dv = tl.dot(k_left * entry[:, None], dkv.T, dv, input_precision=PRECISION)
                    dk = wait_for_mma(tl.dot(v_left * for_dk[:, None], dkv, dk, input_precision=PRECISION))
            normalizer = normalizer_desc.load([state_index, 0, 0]).reshape(D, D)
            if FLOAT16:
                d_kv_scale = tl.load(scales_ptr + D_KV_SCALE)
                entry_scale = k_scale.to(tl.float32) * d_kv_scale
                dv *= (1.0 / (k_scale.to(tl.float32) * entry_scale))[:, None]
                dk *= (value_factor / (v_scale.to(tl.float32) * entry_scale))[:, None]
                from_normalizer = tl.dot(k, normalizer, input_precision=PRECISION)
                dk += from_normalizer * (1.0 / tl.load(scales_ptr + D_NORMALIZER_SCALE))
            else:
                dk = wait_for_mma(tl.dot(k, normalizer, dk, input_precision=PRECISION))
            if GATED:
                since_tile = tl.exp((tl.load(gate_sums_ptr + chunk_end - 1) - reference).to(tl.float32))
                if FLOAT16:
                    dk *= (since_tile * row_decay)[:, None]
                    dv *= (since_tile * row_decay)[:, None]
                else:
                    dk *= since_tile
                    dv *= since_tile

    sequence = (batch * kv_heads + kv_head).to(tl.int64) * GROUP
    offsets = tl.arange(0, COLUMNS)
    after = first + ROWS
    end = tl.minimum(chunk_end, document_end)
    if BLOCK_TERMS:
        # As below, but block by block of queries; what each adds to k_j · dk_j, up to a decay, is stored.
        known = tl.zeros((ROWS,), tl.float32)
        blocks = tl.cdiv(end, query_block)
        for index in tl.range(tl.where(after < end, after // query_block, blocks), blocks):
            start = tl.maximum(after, index * query_block)
            dk, dv = _visit_queries(
                dk, dv, k, v, q_desc, dy_desc, minus_delta_ptr, gate_sums_ptr, from_start_ptr, factor_ptr, reference,
                row_decay, value_factor, gradient_factor, batch, kv_head, sequence, padded, start,
                tl.cdiv(tl.minimum(end, (index + 1) * query_block) - start, COLUMNS),
                GROUP, D, E, POWER, GATED, PRECISION, COLUMNS, STAGES, FLOAT16,
            )  # fmt: skip
            total = tl.sum(dk * k.to(tl.float32), axis=1)
            if FLOAT16:
                total /= gradient_factor * value_factor
            target = block_terms_ptr + (kv_sequence.to(tl.int64) * tl.cdiv(length, query_block) + index) * length + rows
            tl.store(target, total - known, mask=rows < length)
            known = total
    else:
        tiles = tl.cdiv(end - after, COLUMNS)
        if tiles > 0:
            dk, dv = _visit_queries(
                dk, dv, k, v, q_desc, dy_desc, minus_delta_ptr, gate_sums_ptr, from_start_ptr, factor_ptr, reference,
                row_decay, value_factor, gradient_factor, batch, kv_head, sequence, padded, after, tiles,
                GROUP, D, E, POWER, GATED, PRECISION, COLUMNS, STAGES, FLOAT16,
            )  # fmt: skip

    if GATED:
        row_sums = tl.load(gate_sums_ptr + tl.minimum(rows, length - 1))
        row_whole, row_rest = split_sum(row_sums, reference)
        if not FLOAT16:
            row_decay = tl.exp2(-(row_whole + row_rest))
            dk *= row_decay[:, None]
            dv *= row_decay[:, None]
    for step in tl.range(0, GROUP * (ROWS // COLUMNS), num_stages=STAGES):
        member, tile = divide_steps(step, ROWS // COLUMNS, GROUP)
        head = kv_head * GROUP + member
        start = first + tile * COLUMNS
        columns = start + offsets
        minus_delta = tl.load(minus_delta_ptr + (sequence + member) * padded + columns)
        q = q_desc.load([batch, head, start, 0]).reshape(COLUMNS, D)
        dy = dy_desc.load([batch, head, start, 0]).reshape(COLUMNS, E)
        score = tl.dot(k, q.T, input_precision=PRECISION)
        dp = _plus_delta(tl.dot(v, dy.T, input_precision=PRECISION), minus_delta[None, :], value_factor, FLOAT16)
        factor = odd_power(score, POWER - 1)
        if FLOAT16:
            factor *= (tl.load(factor_ptr + (sequence + member) * padded + columns) * gradient_factor)[None, :]
        causal = columns[None, :] >= rows[:, None]
        if GATED:
            column_sums = tl.load(gate_sums_ptr + tl.minimum(columns, length - 1))
            column_whole, column_rest = split_sum(column_sums, reference)
            # Rows are the earlier positions here: exp(G_column − G_row).
            factor *= pairwise_decay(-row_whole, -row_rest, -column_whole, -column_rest, causal)
        else:
            factor = tl.where(causal, factor, 0.0)
        dv = tl.dot((factor * score).to(dy.dtype), dy, dv, input_precision=PRECISION)
        dk = tl.dot((factor * dp).to(q.dtype), q, dk, input_precision=PRECISION)

    dk *= POWER
    if FLOAT16:
        dk *= 1.0 / (gradient_factor * value_factor)
        dv *= 1.0 / gradient_factor
    column_term = tl.sum(dk * k.to(tl.float32), axis=1)
    tl.store(column_term_ptr + kv_sequence.to(tl.int64) * length + rows, column_term, mask=rows < length)
    dk_desc.store([batch, kv_head, first, 0], dk.to(dk_desc.dtype).reshape(1, 1, ROWS, D))
    dv_desc.store([batch, kv_head, first, 0], dv.to(dv_desc.dtype).reshape(1, 1, ROWS, E))


def prepare(
    y: Tensor, dy: Tensor, denominator: Tensor, d_denominator: Tensor | None = None, rows: int = 128
) -> tuple[Tensor, Tensor]:
    """dy' (b, t, h, e), and −δ (b, h, ≥ t) float32, zero from t on and a multiple of `rows` long.

    Args:
        y, dy: the output and its gradient, (b, t, h, e).
        denominator, d_denominator: Σ_j B_ij of each row and their gradient (None: zero), (b, h, t) float32 contiguous.
    """
    batch, length, heads, value_dim = y.shape
    tiles = ceil_div(length, rows)
    block = (rows, block_dim(value_dim))
    divided = empty_aligned(dy, *dy.shape)
    minus_delta = y.new_empty(batch, heads, tiles * rows, dtype=torch.float32)
    launch(
        prepare_kernel, flat_grid(tiles, batch * heads),
        head_major(y, block), head_major(dy, block), denominator, d_denominator, head_major(divided, block),
        minus_delta, length, tiles * rows, heads, D_DENOMINATOR=d_denominator is not None, E=block[1], ROWS=rows,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return divided, minus_delta


def _high(states: ChunkStates | None) -> int:
    """How many entries i ≥ d/2 have an S_i."""
    return 0 if states is None else states.second_half.shape[3]


def _state_arguments(x: Tensor, states: ChunkStates | None, chunk: int, length: int, d: int, e: int) -> tuple:
    """x, its strides and descriptors of the states; and the chunk, number of states and first boundary."""
    if states is None:
        return (x, x.stride(0), x.stride(1), x.stride(2), None, None, None), (chunk or 2 * length + 4096, 0, 1)
    descriptors = (
        blocks_of(states.first_half.flatten(0, 2), [1, 1, e, d]),
        blocks_of(states.second_half.flatten(0, 2), [1, 1, e, d]),
        blocks_of(states.normalizer.flatten(0, 2), [1, d, d]),
    )
    return (x, x.stride(0), x.stride(1), x.stride(2), *descriptors), (states.chunk, states.count, states.first)


def query_gradient(
    q: Tensor, scale: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int,
    gates: Gates | None, states: ChunkStates | None = None,
    *, state_share: Tensor | None = None, chunk: int = 0, documents: Documents | None = None,
    row_gradients: RowGradients | None = None, key_range: KeyRange | None = None,
    out: tuple[Tensor, Tensor] | None = None, rows: int = 128, columns: int = 64, warps: int = 8, stages: int = 3,
    registers: int | None = 128,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (b, t, h, d) of the unscaled queries and q_i · dq_i (b, h, t).

    Args:
        q, scale: from `scale_queries`.
        dy, minus_delta: dy' and −δ from `prepare`.
        gates, chunk, documents, out: as in `forward.attend`.
        states: with all d² features; or None.
        state_share: φ(q_i) Z, as `forward.attend` returns it; only with states.
        row_gradients, key_range: for float16, whose q, scale, dy and minus_delta are those of `row_gradients`; else
            None.
    """
    assert rows % columns == 0 and (gates is None or gates.tile == columns)
    batch, length, heads, dim = q.shape
    d, e = block_dim(dim), block_dim(v.shape[-1])
    dq, row_term = out or (empty_aligned(q, *q.shape), q.new_empty(batch, heads, length, dtype=torch.float32))
    state, location = _state_arguments(q, states, chunk, length, d, e)
    launch(
        query_gradient_kernel, flat_grid(ceil_div(length, rows), batch * heads),
        head_major(q, (rows, d)), head_major(k, (columns, d)), head_major(v, (columns, e)),
        head_major(dy, (rows, e)), minus_delta, head_major(dq, (rows, d)), row_term, scale,
        gates and gates.sums, gates and gates.to_end, *state, state_share,
        key_range and key_range.bound, row_gradients and row_gradients.length, row_gradients and row_gradients.factor,
        key_range and key_range.scales, row_gradients and row_gradients.scales, documents and documents.start,
        length, minus_delta.shape[-1], gates.to_end.shape[-1] if gates else 0, heads, *location,
        GROUP=heads // k.shape[2], D=d, E=e, SECOND_HALF=_high(states), POWER=power, GATED=gates is not None,
        WITH_STATE=states is not None, DOCUMENTS=documents is not None, PRECISION=dot_precision(q.dtype), ROWS=rows,
        COLUMNS=columns, STAGES=stages, FLOAT16=row_gradients is not None,
        num_warps=warps, num_stages=stages, **register_limit(registers), enable_fp_fusion=True,
    )  # fmt: skip
    return dq, row_term


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int,
    gates: Gates | None, states: ChunkStates | None = None,
    *, chunk: int = 0, documents: Documents | None = None, block_terms: Tensor | None = None, query_block: int = 0,
    row_gradients: RowGradients | None = None, key_range: KeyRange | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    rows: int = 64, columns: int = 64, warps: int = 4, stages: int = 3, registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dk (b, t, h_kv, d), dv (b, t, h_kv, e) and k_j · dk_j (b, h_kv, t).

    Args:
        q, dy, minus_delta, gates, chunk, documents, out: as in `query_gradient`.
        states: the gradients of the states, with all d² features; or None.
        block_terms: zeros (b, h_kv, ⌈t / query_block⌉, t) float32, filled with Σ_i B_ij dB_ij over the queries of each
            block that lie after the key's tile, with decays counted from the end of that tile, for float16 from the
            key; None: not wanted. Only without states.
        row_gradients, key_range: as in `query_gradient`.
    """
    assert rows % columns == 0 and (gates is None or gates.tile == columns)
    batch, length, kv_heads, dim = k.shape
    d, e = block_dim(dim), block_dim(v.shape[-1])
    if out is None:
        dk, dv = empty_aligned(k, *k.shape), empty_aligned(v, *v.shape)
        column_term = k.new_empty(batch, kv_heads, length, dtype=torch.float32)
    else:
        dk, dv, column_term = out
    k_desc = head_major(k, (rows, d))
    state, location = _state_arguments(k_desc.base.transpose(1, 2), states, chunk, length, d, e)
    launch(
        key_gradient_kernel, flat_grid(ceil_div(length, rows), batch * kv_heads),
        head_major(q, (columns, d)), k_desc, head_major(v, (rows, e)), head_major(dy, (columns, e)), minus_delta,
        head_major(dk, (rows, d)), head_major(dv, (rows, e)), column_term,
        gates and gates.sums, gates and gates.from_start, *state, row_gradients and row_gradients.factor,
        row_gradients and row_gradients.scales, key_range and key_range.token_scales, documents and documents.end,
        block_terms, length, minus_delta.shape[-1], gates.from_start.shape[-1] if gates else 0, kv_heads, *location,
        query_block, GROUP=q.shape[2] // kv_heads, D=d, E=e, SECOND_HALF=_high(states), POWER=power,
        GATED=gates is not None, WITH_STATE=states is not None, DOCUMENTS=documents is not None,
        BLOCK_TERMS=block_terms is not None, PRECISION=dot_precision(k.dtype), ROWS=rows, COLUMNS=columns,
        STAGES=stages, FLOAT16=row_gradients is not None, num_warps=warps, num_stages=stages,
        **register_limit(registers), enable_fp_fusion=True,
    )  # fmt: skip
    return dk, dv, column_term
