"""Backward pass of the attention form on Hopper, and of the chunked form once the products with states
are known (`states`), warp-specialized as in `forward`.

The equations are those of `sympow.kernels.attention.backward`. Two kernels, each of which owns its outputs, so that
results are bitwise reproducible. With the decays of a block of 128 tokens multiplied into the operand that a kernel
visits (`decayed`; p-th roots, so s' = d^(1/p) s for scores s and decays d),
    d s^(p−1) dB k = s'^(p−1) dB k'    and    d s^(p−1) dB q = s'^(p−1) dB q',
so that both products of a tile read that operand, and only the decay between the blocks is left, one factor per
tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sympow.kernels.common import divide_steps, even_power, odd_power
from sympow.kernels.float16_range import (
    FACTORED_VALUE_FACTOR,
    GRADIENT_FACTOR,
    GRADIENT_SCALES,
    KEY_LENGTH,
    KEY_UNIT,
    VALUE_FACTOR,
    KeyRange,
    RowGradients,
    power_of_two,
    query_exponents,
)
from sympow.kernels.hopper.common import (
    async_load,
    async_store,
    free_stage,
    gluon_head_major,
    load_rows,
    matrix,
    new_barriers,
    padded_width,
    pairwise_decay,
    prefetch,
    sums_before_chunk,
    sums_since,
    thread_barrier,
)
from sympow.kernels.hopper.decayed import BLOCK, decayed, multiply_factors
from sympow.kernels.hopper.forward import COPY_REGISTERS, REGISTERS, START_REGISTERS
from sympow.kernels.launch import ceil_div, empty_aligned, flat_grid, launch
from sympow.kernels.running_sums import Gates

# Tokens per tile and per warpgroup; tiles of keys and of values in shared memory for the gradient of the queries; tiles
# of queries and of output gradients for that of the keys.
TILE, KEY_RING, QUERY_RING = 64, 4, 3


@gluon.jit
def _copy_keys(
    k_desc, decayed_desc, v_desc, batch, head, begin, steps_before, steps, buffers, ready, empty, STAGES: gl.constexpr
):
    """Copies the tiles of keys and values of all steps, from row `begin` on; from `steps_before` on they lie on the
    diagonal."""
    COLUMNS: gl.constexpr = k_desc.block_type.shape[2]
    k_buffers, v_buffers = buffers
    for step in range(steps):
        stage = step % STAGES
        start = [batch, head, begin + step * COLUMNS, 0]
        barrier = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        async_load(decayed_desc, start, barrier, k_buffers.index(stage), pred=step < steps_before)
        async_load(k_desc, start, barrier, k_buffers.index(stage), pred=step >= steps_before)
        async_load(v_desc, start, barrier, v_buffers.index(stage))


@gluon.jit
def plus_delta(products, minus_delta, factor, FLOAT16: gl.constexpr):
    """dy · v − δ; FLOAT16: times a factor that δ already has (`float16_range`)."""
    if FLOAT16:
        return products * factor + minus_delta
    else:
        return products + minus_delta


@gluon.jit
def row_factors(
    minus_delta, q_length, bound, own_bound, key_length, tile_decay, scales_ptr, POWER: gl.constexpr
):  # fmt: skip
    """In float16, what dy · v − δ is multiplied by, −δ times that, and the change of both on the diagonal, as log2; as
    in the portable kernel (`float16_range`)."""
    exponent, change = query_exponents(q_length, bound, own_bound, key_length, tile_decay, POWER)
    change *= POWER - 1
    row_scale = gl.expand_dims(power_of_two(exponent * (POWER - 1)) / key_length, 1)
    row_factor = row_scale * gl.load(scales_ptr + VALUE_FACTOR)
    return row_factor, minus_delta * row_scale, change


@gluon.jit
def of_unscaled_queries(dq, q, first, sequence, length, row_term_ptr, scale_ptr, DQ: gl.constexpr):
    """dq of the unscaled queries, from that of the scaled queries q in shared memory; stores q_i · dq_i."""
    own = q.load(DQ).to(gl.float32)
    rows = first + gl.arange(0, dq.shape[0], gl.SliceLayout(1, DQ))
    offsets = sequence.to(gl.int64) * length + rows
    gl.store(row_term_ptr + offsets, gl.sum(dq * own, axis=1), mask=rows < length)
    return dq * gl.expand_dims(gl.load(scale_ptr + offsets, mask=rows < length, other=0.0), 1)


@gluon.jit
def _query_rows(
    descriptors, pointers, place, own_buffers, own_ready, buffers, ready, empty,
    MEMBER: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, WITH_STATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq_i and q_i · dq_i for the queries of one warpgroup."""
    q_desc, v_desc, dq_desc = descriptors
    minus_delta_ptr, row_term_ptr, scale_ptr, whole_ptr, rest_ptr, dq_from_state_ptr, half_pointers = pointers
    batch, head, sequence, first, begin, steps_before, steps, length, padded, chunk, first_boundary = place
    q_buffers, dy_buffers = own_buffers
    k_buffers, v_buffers = buffers
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    COLUMNS: gl.constexpr = v_desc.block_type.shape[2]
    OWNED: gl.constexpr = 2 * ROWS
    dtype: gl.constexpr = q_desc.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT_DQ: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    DQ_BY_ROW: gl.constexpr = gl.SliceLayout(1, DQ)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)

    rows = first + MEMBER * ROWS + gl.arange(0, ROWS, BY_ROW)
    minus_delta = gl.expand_dims(gl.load(minus_delta_ptr + sequence.to(gl.int64) * padded + rows), 1)
    if GATED:
        reference_whole = gl.load(whole_ptr + first)
        reference_rest = gl.load(rest_ptr + first)
    row_factor = minus_delta
    if FLOAT16:
        # As in the portable kernel: see `float16_range`.
        bound_ptr, q_length_ptr, factor_ptr, scales_ptr = half_pointers
        key_length = gl.load(scales_ptr + KEY_LENGTH)
        q_length = gl.load(q_length_ptr + sequence.to(gl.int64) * padded + rows)
        own_bound = gl.load(bound_ptr + gl.minimum(rows, length - 1))
        tile_decay = gl.zeros_like(q_length)
        if GATED:
            tile_decay = (reference_whole - gl.load(whole_ptr + rows)).to(gl.float32)
            tile_decay += reference_rest - gl.load(rest_ptr + rows)
        row_factor, minus_delta, change = row_factors(
            minus_delta, q_length, gl.load(bound_ptr + first), own_bound, key_length, tile_decay, scales_ptr, POWER
        )
    mbarrier.wait(own_ready, 0)
    q = matrix(q_buffers, MEMBER)
    dy = matrix(dy_buffers, MEMBER)
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    dq = gl.zeros((ROWS, D), gl.float32, DQ)
    if WITH_STATE:
        boundary = begin // chunk
        if boundary >= first_boundary:
            state_rows = first + MEMBER * ROWS + gl.arange(0, ROWS, DQ_BY_ROW)
            dq = load_rows(dq_from_state_ptr, sequence, state_rows, length, D, DQ)
            if GATED:
                whole, rest = sums_before_chunk(whole_ptr, rest_ptr, boundary, chunk)
                dq *= gl.exp2((reference_whole - whole).to(gl.float32) + (reference_rest - rest))

    if steps_before > 0:
        mbarrier.wait(ready.index(0), 0)
        scores = warpgroup_mma(q, matrix(k_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(dy, matrix(v_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        grads = odd_power(scores, POWER - 1) * plus_delta(dp, minus_delta, row_factor, FLOAT16)
        if GATED:
            log_decay = (reference_whole - gl.load(whole_ptr + begin + OWNED - 1)).to(gl.float32)
            log_decay += reference_rest - gl.load(rest_ptr + begin + OWNED - 1)
            grads *= gl.exp2(log_decay)
        for step in range(1, steps_before):
            stage = step % STAGES
            last = (step - 1) % STAGES
            left = gl.convert_layout(grads.to(dtype), LEFT_DQ)
            if GATED:
                block_end = begin + (step * COLUMNS // OWNED + 1) * OWNED - 1
                end_whole = gl.load(whole_ptr + block_end)
                end_rest = gl.load(rest_ptr + block_end)
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            scores = warpgroup_mma(q, matrix(k_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dp = warpgroup_mma(dy, matrix(v_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dq = warpgroup_mma(left, matrix(k_buffers, last), dq, is_async=True)
            scores, dp = warpgroup_mma_wait(1, deps=(scores, dp))
            grads = odd_power(scores, POWER - 1) * plus_delta(dp, minus_delta, row_factor, FLOAT16)
            if GATED:
                grads *= gl.exp2((reference_whole - end_whole).to(gl.float32) + (reference_rest - end_rest))
            dq, grads = warpgroup_mma_wait(0, deps=(dq, grads))
            free_stage(empty, last)
        last = (steps_before - 1) % STAGES
        dq = warpgroup_mma(gl.convert_layout(grads.to(dtype), LEFT_DQ), matrix(k_buffers, last), dq)
        free_stage(empty, last)

    if GATED:
        row_whole = (gl.load(whole_ptr + rows) - reference_whole).to(gl.float32)
        if FLOAT16:
            row_whole += change
        row_rest = gl.load(rest_ptr + rows) - reference_rest
        dq *= gl.expand_dims(gl.convert_layout(gl.exp2(row_whole + row_rest), DQ_BY_ROW), 1)
    elif FLOAT16:
        dq *= gl.expand_dims(gl.convert_layout(power_of_two(change), DQ_BY_ROW), 1)
    for step in range(steps_before, steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(q, matrix(k_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(dy, matrix(v_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        columns = begin + step * COLUMNS + gl.arange(0, COLUMNS, BY_COLUMN)
        causal = gl.expand_dims(rows, 1) >= gl.expand_dims(columns, 0)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        grads = odd_power(scores, POWER - 1) * plus_delta(dp, minus_delta, row_factor, FLOAT16)
        if GATED:
            column_whole, column_rest = sums_since(whole_ptr, rest_ptr, columns, reference_whole, reference_rest)
            grads *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
        else:
            if FLOAT16:
                grads *= gl.expand_dims(power_of_two(change), 1)
            grads = gl.where(causal, grads, 0.0)
        dq = warpgroup_mma(gl.convert_layout(grads.to(dtype), LEFT_DQ), matrix(k_buffers, stage), dq)
        free_stage(empty, stage)

    dq *= POWER
    if FLOAT16:
        unscale = gl.load(factor_ptr + sequence.to(gl.int64) * padded + rows) * power_of_two(-change)
        unscale /= gl.max(row_factor, axis=1)
        dq *= gl.expand_dims(gl.convert_layout(unscale, DQ_BY_ROW), 1)
    dq = of_unscaled_queries(dq, q, first + MEMBER * ROWS, sequence, length, row_term_ptr, scale_ptr, DQ)
    q.store(dq.to(dtype))
    fence_async_shared()
    thread_barrier()
    async_store(dq_desc, [batch, head, first + MEMBER * ROWS, 0], q_buffers.index(MEMBER))
    tma.store_wait(0)


@gluon.jit
def query_gradient_kernel(
    q_desc, k_desc, decayed_desc, v_desc, dy_desc, minus_delta_ptr, dq_desc, row_term_ptr, scale_ptr,
    whole_ptr, rest_ptr, dq_from_state_ptr, bound_ptr, q_length_ptr, factor_ptr, scales_ptr,
    length, padded, gates_padded, heads, tiles, chunk, first_boundary,
    GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, WITH_STATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq_i = p Σ_{j≤i} T_ij dB_ij k_j for 128 queries, times the scale of the query, and q_i · dq_i."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    program = gl.program_id(0)
    tile = tiles - 1 - program % tiles  # tiles with the most keys start first
    sequence = program // tiles
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    first = tile * 2 * ROWS
    begin = first // chunk * chunk
    steps_before = (first - begin) // v_desc.block_type.shape[2]
    steps = (first + 2 * ROWS - begin) // v_desc.block_type.shape[2]
    kv_sequence = (batch * (heads // GROUP) + kv_head).to(gl.int64)
    if dtype == gl.float16:
        bound_ptr += kv_sequence * length
        scales_ptr += kv_sequence * GRADIENT_SCALES
    if GATED:
        whole_ptr += kv_sequence * gates_padded
        rest_ptr += kv_sequence * gates_padded

    q_buffers = gl.allocate_shared_memory(dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    dy_buffers = gl.allocate_shared_memory(dtype, [2] + dy_desc.block_type.shape, dy_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    own_ready = new_barriers(1, 1)
    ready = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(own_ready.index(0), 2 * (q_desc.block_type.nbytes + dy_desc.block_type.nbytes))
    for member in gl.static_range(2):
        async_load(q_desc, [batch, head, first + member * ROWS, 0], own_ready.index(0), q_buffers.index(member))
        async_load(dy_desc, [batch, head, first + member * ROWS, 0], own_ready.index(0), dy_buffers.index(member))

    descriptors = (q_desc, v_desc, dq_desc)
    half_pointers = (bound_ptr, q_length_ptr, factor_ptr, scales_ptr)
    pointers = (minus_delta_ptr, row_term_ptr, scale_ptr, whole_ptr, rest_ptr, dq_from_state_ptr, half_pointers)
    place = (batch, head, sequence, first, begin, steps_before, steps, length, padded, chunk, first_boundary)
    own_buffers = (q_buffers, dy_buffers)
    buffers = (k_buffers, v_buffers)
    gl.warp_specialize([
        (_query_rows, (descriptors, pointers, place, own_buffers, own_ready.index(0), buffers, ready, empty,
                       gl.constexpr(0), POWER, GATED, WITH_STATE, STAGES)),
        (_query_rows, (descriptors, pointers, place, own_buffers, own_ready.index(0), buffers, ready, empty,
                       gl.constexpr(1), POWER, GATED, WITH_STATE, STAGES)),
        (_copy_keys, (k_desc, decayed_desc, v_desc, batch, kv_head, begin, steps_before, steps, buffers, ready, empty,
                      STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


@gluon.jit
def _tiles_of_block(index, after, end, query_block, COLUMNS: gl.constexpr):
    """The first query of block `index` that comes after the keys, and the number of tiles from there on."""
    start = gl.maximum(after, index * query_block)
    return start, gl.maximum(gl.cdiv(gl.minimum(end, (index + 1) * query_block) - start, COLUMNS), 0)


@gluon.jit
def _copy_query_tile(q_desc, dy_desc, batch, head, row, step, buffers, ready, empty, STAGES: gl.constexpr):
    q_buffers, dy_buffers = buffers
    stage = step % STAGES
    barrier = ready.index(stage)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(barrier, q_desc.block_type.nbytes + dy_desc.block_type.nbytes)
    async_load(q_desc, [batch, head, row, 0], barrier, q_buffers.index(stage))
    async_load(dy_desc, [batch, head, row, 0], barrier, dy_buffers.index(stage))


@gluon.jit
def _copy_queries(
    q_desc, decayed_desc, dy_desc, batch, head, first, end, query_block, buffers, ready, empty,
    OWNED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the queries and output gradients after the keys, block by block and head by head, then the diagonal's."""
    COLUMNS: gl.constexpr = q_desc.block_type.shape[2]
    after = first + OWNED
    step = 0
    for index in range(after // query_block, gl.cdiv(end, query_block)):
        start, tiles = _tiles_of_block(index, after, end, query_block, COLUMNS)
        for n in range(GROUP * tiles):
            member, tile = divide_steps(n, tiles, GROUP)
            row = start + tile * COLUMNS
            _copy_query_tile(decayed_desc, dy_desc, batch, head + member, row, step, buffers, ready, empty, STAGES)
            step += 1
    DIAGONAL: gl.constexpr = OWNED // COLUMNS
    for n in range(GROUP * DIAGONAL):
        row = first + n % DIAGONAL * COLUMNS
        _copy_query_tile(q_desc, dy_desc, batch, head + n // DIAGONAL, row, step, buffers, ready, empty, STAGES)
        step += 1


@gluon.jit
def _key_rows(
    descriptors, pointers, place, own_buffers, own_ready, buffers, ready, empty, MEMBER: gl.constexpr,
    GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, WITH_STATE: gl.constexpr,
    BLOCK_TERMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk_j, dv_j and k_j · dk_j for the keys of one warpgroup; rows are keys here, and columns queries."""
    k_desc, q_desc, dk_desc, dv_desc = descriptors
    (minus_delta_ptr, column_term_ptr, block_terms_ptr, whole_ptr, rest_ptr, dk_from_later_ptr, dv_from_later_ptr,
     scales_ptr) = pointers  # fmt: skip
    batch, kv_head, kv_sequence, first, end, length, padded, query_block, last_chunk = place
    k_buffers, v_buffers = own_buffers
    q_buffers, dy_buffers = buffers
    ROWS: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    COLUMNS: gl.constexpr = q_desc.block_type.shape[2]
    E: gl.constexpr = dv_desc.block_type.shape[3]
    OWNED: gl.constexpr = 2 * ROWS
    dtype: gl.constexpr = k_desc.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    LEFT_DK: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    LEFT_DV: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    DK_BY_ROW: gl.constexpr = gl.SliceLayout(1, DK)
    DV_BY_ROW: gl.constexpr = gl.SliceLayout(1, DV)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)

    mine = first + MEMBER * ROWS
    after = first + OWNED
    offsets = gl.arange(0, COLUMNS, BY_COLUMN)
    spread = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [4], [0]))
    if GATED:
        reference_whole = gl.load(whole_ptr + after - 1)
        reference_rest = gl.load(rest_ptr + after - 1)
    mbarrier.wait(own_ready, 0)
    k = matrix(k_buffers, MEMBER)
    v = matrix(v_buffers, MEMBER)
    value_factor = 1.0
    if FLOAT16:
        # In the units of the queries, times their factors (`decayed.FactoredRows`).
        unit = gl.load(scales_ptr + KEY_UNIT)
        value_factor = gl.load(scales_ptr + FACTORED_VALUE_FACTOR)
        gradient_factor = gl.load(scales_ptr + GRADIENT_FACTOR)
        k.store((k.load(DK).to(gl.float32) * unit).to(dtype))
        fence_async_shared()
        thread_barrier()
        if GATED:
            own_rows = mine + gl.arange(0, ROWS, BY_ROW)
            own_decay = (reference_whole - gl.load(whole_ptr + own_rows)).to(gl.float32)
            to_reference = gl.exp2(own_decay + (reference_rest - gl.load(rest_ptr + own_rows)))
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    dk = gl.zeros((ROWS, D), gl.float32, DK)
    dv = gl.zeros((ROWS, E), gl.float32, DV)
    known = gl.zeros((ROWS,), gl.float32, DK_BY_ROW)
    if WITH_STATE:
        if not last_chunk:
            state_rows = mine + gl.arange(0, ROWS, DK_BY_ROW)
            dk = load_rows(dk_from_later_ptr, kv_sequence, state_rows, length, D, DK)
            state_rows = mine + gl.arange(0, ROWS, DV_BY_ROW)
            dv = load_rows(dv_from_later_ptr, kv_sequence, state_rows, length, E, DV)
            if GATED:
                log_decay = (gl.load(whole_ptr + end - 1) - reference_whole).to(gl.float32)
                since_keys = gl.exp2(log_decay + (gl.load(rest_ptr + end - 1) - reference_rest))
                dk *= since_keys
                dv *= since_keys

    step = 0
    blocks = gl.cdiv(end, query_block)
    for index in range(after // query_block, blocks):
        start, tiles = _tiles_of_block(index, after, end, query_block, COLUMNS)
        for n in range(GROUP * tiles):
            member, tile = divide_steps(n, tiles, GROUP)
            row = start + tile * COLUMNS
            stage = step % STAGES
            prefetch(minus_delta_ptr + member * padded + row + spread)
            scale = 1.0
            if GATED:
                start_whole = gl.load(whole_ptr + row // OWNED * OWNED)
                start_rest = gl.load(rest_ptr + row // OWNED * OWNED)
                scale = gl.exp2((start_whole - reference_whole).to(gl.float32) + (start_rest - reference_rest))
                if FLOAT16:
                    # Not after the sums: with strong gates, weights counted from the end of the keys leave the range.
                    scale = gl.expand_dims(to_reference * scale, 1)
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            scores = warpgroup_mma(k, matrix(q_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, matrix(dy_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
            # Loaded only now: no registers are free before.
            minus_delta = gl.expand_dims(gl.load(minus_delta_ptr + member * padded + row + offsets), 0)
            dp = plus_delta(dp, minus_delta, value_factor, FLOAT16)
            grads = gl.convert_layout((odd_power(scores, POWER - 1) * scale * dp).to(dtype), LEFT_DK)
            weights = gl.convert_layout((even_power(scores, POWER) * scale).to(dtype), LEFT_DV)
            dv = warpgroup_mma(weights, matrix(dy_buffers, stage), dv, is_async=True)
            dk = warpgroup_mma(grads, matrix(q_buffers, stage), dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
            free_stage(empty, stage)
            step += 1
        if BLOCK_TERMS:
            # Decays count from the end of a tile of keys, as in the portable kernel.
            total = gl.sum(dk * k.load(DK).to(gl.float32), axis=1)
            to_end = 1.0
            if FLOAT16:
                to_end = 1.0 / gradient_factor / value_factor
            elif GATED:
                log_decay = (reference_whole - gl.load(whole_ptr + mine + ROWS - 1)).to(gl.float32)
                to_end = gl.exp2(log_decay + (reference_rest - gl.load(rest_ptr + mine + ROWS - 1)))
            rows = mine + gl.arange(0, ROWS, DK_BY_ROW)
            target = block_terms_ptr + (kv_sequence.to(gl.int64) * blocks + index) * length + rows
            gl.store(target, (total - known) * to_end, mask=rows < length)
            known = total

    rows = mine + gl.arange(0, ROWS, BY_ROW)
    if GATED:
        row_whole, row_rest = sums_since(whole_ptr, rest_ptr, rows, reference_whole, reference_rest)
        if not FLOAT16:
            row_decay = gl.exp2(-(row_whole + row_rest))
            dk *= gl.expand_dims(gl.convert_layout(row_decay, DK_BY_ROW), 1)
            dv *= gl.expand_dims(gl.convert_layout(row_decay, DV_BY_ROW), 1)
    DIAGONAL: gl.constexpr = OWNED // COLUMNS
    for n in range(GROUP * DIAGONAL):
        stage = step % STAGES
        columns = first + n % DIAGONAL * COLUMNS + offsets
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(k, matrix(q_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, matrix(dy_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        minus_delta = gl.expand_dims(gl.load(minus_delta_ptr + n // DIAGONAL * padded + columns), 0)
        dp = plus_delta(dp, minus_delta, value_factor, FLOAT16)
        factor = odd_power(scores, POWER - 1)
        causal = gl.expand_dims(columns, 0) >= gl.expand_dims(rows, 1)
        if GATED:
            column_whole, column_rest = sums_since(whole_ptr, rest_ptr, columns, reference_whole, reference_rest)
            factor *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal, ROWS_LATER=False)
        else:
            factor = gl.where(causal, factor, 0.0)
        weights = gl.convert_layout((factor * scores).to(dtype), LEFT_DV)
        grads = gl.convert_layout((factor * dp).to(dtype), LEFT_DK)
        dv = warpgroup_mma(weights, matrix(dy_buffers, stage), dv, is_async=True)
        dk = warpgroup_mma(grads, matrix(q_buffers, stage), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
        free_stage(empty, stage)
        step += 1

    dk *= POWER
    if FLOAT16:
        dk *= 1.0 / gradient_factor / value_factor
        dv *= 1.0 / gradient_factor
    rows = mine + gl.arange(0, ROWS, DK_BY_ROW)
    column_term = gl.sum(dk * k.load(DK).to(gl.float32), axis=1)
    gl.store(column_term_ptr + kv_sequence.to(gl.int64) * length + rows, column_term, mask=rows < length)
    if FLOAT16:
        dk *= unit
    k.store(dk.to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    thread_barrier()
    async_store(dk_desc, [batch, kv_head, mine, 0], k_buffers.index(MEMBER))
    async_store(dv_desc, [batch, kv_head, mine, 0], v_buffers.index(MEMBER))
    tma.store_wait(0)


@gluon.jit
def key_gradient_kernel(
    q_desc, decayed_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dk_desc, dv_desc, column_term_ptr, block_terms_ptr,
    whole_ptr, rest_ptr, dk_from_later_ptr, dv_from_later_ptr, scales_ptr,
    length, padded, gates_padded, kv_heads, tiles, query_block, chunk, last_boundary,
    GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, WITH_STATE: gl.constexpr,
    BLOCK_TERMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dv_j and dk_j for 128 keys, summed over the query heads that read them, and k_j · dk_j.

    BLOCK_TERMS: also what each block of `query_block` queries, a multiple of 128, adds to k_j · dk_j, without what lies
    in one block of 128 tokens with the key. In float16, queries are multiplied by their factors.
    """
    ROWS: gl.constexpr = k_desc.block_type.shape[2]
    OWNED: gl.constexpr = 2 * ROWS
    dtype: gl.constexpr = k_desc.dtype
    program = gl.program_id(0)
    first = program % tiles * OWNED
    kv_sequence = program // tiles
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    boundary = first // chunk + 1
    end = gl.minimum(boundary * chunk, length)
    minus_delta_ptr += kv_sequence.to(gl.int64) * GROUP * padded
    if dtype == gl.float16:
        scales_ptr += kv_sequence.to(gl.int64) * GRADIENT_SCALES
    if GATED:
        whole_ptr += kv_sequence.to(gl.int64) * gates_padded
        rest_ptr += kv_sequence.to(gl.int64) * gates_padded

    k_buffers = gl.allocate_shared_memory(dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dy_buffers = gl.allocate_shared_memory(dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout)
    own_ready = new_barriers(1, 1)
    ready = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(own_ready.index(0), 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for member in gl.static_range(2):
        async_load(k_desc, [batch, kv_head, first + member * ROWS, 0], own_ready.index(0), k_buffers.index(member))
        async_load(v_desc, [batch, kv_head, first + member * ROWS, 0], own_ready.index(0), v_buffers.index(member))

    descriptors = (k_desc, q_desc, dk_desc, dv_desc)
    pointers = (minus_delta_ptr, column_term_ptr, block_terms_ptr, whole_ptr, rest_ptr, dk_from_later_ptr,
    dv_from_later_ptr,
                scales_ptr)  # fmt: skip
    place = (batch, kv_head, kv_sequence, first, end, length, padded, query_block, boundary > last_boundary)
    own_buffers = (k_buffers, v_buffers)
    buffers = (q_buffers, dy_buffers)
    gl.warp_specialize([
        (_key_rows, (descriptors, pointers, place, own_buffers, own_ready.index(0), buffers, ready, empty,
                     gl.constexpr(0), GROUP, POWER, GATED, WITH_STATE, BLOCK_TERMS, STAGES)),
        (_key_rows, (descriptors, pointers, place, own_buffers, own_ready.index(0), buffers, ready, empty,
                     gl.constexpr(1), GROUP, POWER, GATED, WITH_STATE, BLOCK_TERMS, STAGES)),
        (_copy_queries, (q_desc, decayed_desc, dy_desc, batch, kv_head * GROUP, first, end, query_block, buffers,
                         ready, empty, OWNED, GROUP, STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def _tiles(x: Tensor, width: int) -> TensorDescriptor:
    return gluon_head_major(x, TILE, width)


def query_gradient(
    q: Tensor, scale: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int,
    gates: Gates | None, *,
    chunk: int = 0, first_boundary: int = 0, dq_from_state: Tensor | None = None,
    row_gradients: RowGradients | None = None, key_range: KeyRange | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (b, t, h, d) of the unscaled queries and q_i · dq_i (b, h, t), from q and scale of `scale_queries`, dy' and −δ
    of `prepare`.

    Args:
        chunk, first_boundary: as in `forward.attend`.
        dq_from_state: dq / p of what the queries read from states (b, h, t, d), float32, without decay since the start
            of the chunk; None: there are no states.
        row_gradients, key_range: as in `attention.backward.query_gradient`.
    """
    split = None if gates is None else gates.split
    batch, length, heads, _ = q.shape
    dq = empty_aligned(q, *q.shape)
    row_term = q.new_empty(batch, heads, length, dtype=torch.float32)
    tiles = ceil_div(length, BLOCK)
    width = padded_width(q, v)
    launch(
        query_gradient_kernel, flat_grid(tiles, batch * heads),
        _tiles(q, width), _tiles(k, width), _tiles(decayed(k, split, power, to_end=True), width),
        _tiles(v, width), _tiles(dy, width), minus_delta, _tiles(dq, width), row_term, scale,
        split and split.whole, split and split.rest, dq_from_state,
        key_range and key_range.bound, row_gradients and row_gradients.length, row_gradients and row_gradients.factor,
        row_gradients and row_gradients.scales,
        length, minus_delta.shape[-1], split.whole.shape[-1] if split else 0, heads, tiles, chunk or tiles * BLOCK,
        first_boundary, GROUP=heads // k.shape[2], POWER=power, GATED=gates is not None,
        WITH_STATE=dq_from_state is not None, STAGES=KEY_RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return dq, row_term


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int,
    gates: Gates | None, *,
    block_terms: Tensor | None = None, query_block: int = 0,
    chunk: int = 0, last_boundary: int = 0, from_later_chunks: tuple[Tensor, Tensor] | None = None,
    row_gradients: RowGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dk (b, t, h_kv, d), dv (b, t, h_kv, e) and k_j · dk_j (b, h_kv, t); arguments as for `query_gradient`.

    Args:
        chunk: as in `forward.attend`.
        last_boundary: with states, the last chunk boundary that has one.
        from_later_chunks: dk / p and dv of what later chunks read through states, (b, h_kv, t, d) and (b, h_kv, t, e),
            float32, without the decay to the end of the chunk; None: there are no states.
        block_terms, query_block: as in `attention.backward.key_gradient`; query_block is a multiple of 128.
        row_gradients: for float16, without states; else None.
    """
    assert query_block % BLOCK == 0
    split = None if gates is None else gates.split
    batch, length, kv_heads, _ = k.shape
    if row_gradients is None:
        later = decayed(q, split, power, to_end=False)
    else:
        factored = multiply_factors(row_gradients, split, power, kv_heads)
        q, later, minus_delta = factored.q, factored.decayed, factored.minus_delta
    dk, dv = empty_aligned(k, *k.shape), empty_aligned(v, *v.shape)
    column_term = k.new_empty(batch, kv_heads, length, dtype=torch.float32)
    tiles = ceil_div(length, BLOCK)
    width = padded_width(q, v)
    launch(
        key_gradient_kernel, flat_grid(tiles, batch * kv_heads),
        _tiles(q, width), _tiles(later, width), _tiles(k, width),
        _tiles(v, width), _tiles(dy, width), minus_delta, _tiles(dk, width), _tiles(dv, width), column_term,
        block_terms, split and split.whole, split and split.rest, *(from_later_chunks or (None, None)),
        row_gradients and row_gradients.scales,
        length, minus_delta.shape[-1], split.whole.shape[-1] if split else 0, kv_heads, tiles,
        tiles * BLOCK if block_terms is None else query_block, chunk or tiles * BLOCK, last_boundary,
        GROUP=q.shape[2] // kv_heads, POWER=power, GATED=gates is not None,
        WITH_STATE=from_later_chunks is not None, BLOCK_TERMS=block_terms is not None, STAGES=QUERY_RING, num_warps=4,
        maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return dk, dv, column_term
