"""Backward pass of the attention form on Hopper, for short sequences of heads of 64 (see `short_forward`).

The equations are those of `sympow.kernels.attention.backward`.

Two kernels, each of which owns its outputs, so that results are bitwise reproducible. A CTA owns 64 rows and visits
tiles of 64 columns. The products that compute the scores of a tile run together with those that use the scores of the
previous tile, and the weights of this tile are computed meanwhile. Decays are as in `short_forward`, without float64;
the diagonal takes one exponential per element.
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

from sympow.kernels.common import divide_steps, odd_power, split_program_id
from sympow.kernels.float16_range import (
    GRADIENT_SCALES,
    KEY_LENGTH,
    KeyRange,
    RowGradients,
    power_of_two,
)
from sympow.kernels.hopper.backward import of_unscaled_queries, plus_delta, row_factors
from sympow.kernels.hopper.common import (
    async_load,
    async_store,
    gluon_head_major,
    matrix,
    new_barriers,
    pairwise_decay,
    prefetch,
    sums_since,
    thread_barrier,
)
from sympow.kernels.launch import ceil_div, empty_aligned, flat_grid, launch, two_axis_grid
from sympow.kernels.running_sums import Gates

TILE, RING = 64, 4


@gluon.jit
def load_keys(k_desc, v_desc, batch, head, step, steps, k_buffers, v_buffers, barriers, STAGES: gl.constexpr):
    """Starts the copy of a tile of keys and values; does nothing past the last step."""
    COLUMNS: gl.constexpr = k_desc.block_type.shape[2]
    stage = step % STAGES
    wanted = step < steps
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=wanted)
    async_load(k_desc, [batch, head, step * COLUMNS, 0], barrier, k_buffers.index(stage), pred=wanted)
    async_load(v_desc, [batch, head, step * COLUMNS, 0], barrier, v_buffers.index(stage), pred=wanted)


@gluon.jit
def query_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dq_desc, row_term_ptr, scale_ptr,
    whole_ptr, rest_ptr, to_end_ptr, bound_ptr, q_length_ptr, factor_ptr, scales_ptr,
    length, padded, gates_padded, heads,
    GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr = False,
):  # fmt: skip
    """dq_i = p Σ_{j≤i} T_ij dB_ij k_j for a tile of queries, times the scale of the query, and q_i · dq_i.

    FLAT: the grid of `two_axis_grid` has one axis.
    """
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    COLUMNS: gl.constexpr = k_desc.block_type.shape[2]
    E: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT_DQ: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    DQ_BY_ROW: gl.constexpr = gl.SliceLayout(1, DQ)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)

    tiles = gl.cdiv(length, ROWS)
    order, sequence = gl.program_id(0), gl.program_id(1)
    if FLAT:
        order, sequence = split_program_id(tiles, gl.int32)
    tile = tiles - 1 - order  # tiles with the most keys start first
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * ROWS
    steps_before = first // COLUMNS
    steps = steps_before + ROWS // COLUMNS

    q_buffer = gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout)
    dy_buffer = gl.allocate_shared_memory(dtype, dy_desc.block_type.shape, dy_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    start_barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(start_barrier, count=1)
    barriers = new_barriers(STAGES, 1)
    fence_async_shared()
    mbarrier.expect(start_barrier, q_desc.block_type.nbytes + dy_desc.block_type.nbytes)
    async_load(q_desc, [batch, head, first, 0], start_barrier, q_buffer)
    async_load(dy_desc, [batch, head, first, 0], start_barrier, dy_buffer)
    for early in gl.static_range(STAGES):
        load_keys(k_desc, v_desc, batch, kv_head, early, steps, k_buffers, v_buffers, barriers, STAGES)

    offsets = gl.arange(0, COLUMNS, BY_COLUMN)
    spread = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [4], [0]))
    rows = first + gl.arange(0, ROWS, BY_ROW)
    minus_delta = gl.expand_dims(gl.load(minus_delta_ptr + sequence.to(gl.int64) * padded + rows), 1)
    row_factor = minus_delta
    if FLOAT16:
        # As in the portable kernel: see `float16_range`.
        bound_ptr += kv_sequence.to(gl.int64) * length
        q_length = gl.load(q_length_ptr + sequence.to(gl.int64) * padded + rows)
        own_bound = gl.load(bound_ptr + gl.minimum(rows, length - 1))
        scales_ptr += kv_sequence * GRADIENT_SCALES
        key_length = gl.load(scales_ptr + KEY_LENGTH)
        tile_decay = gl.zeros_like(q_length)
        if GATED:
            gates = kv_sequence.to(gl.int64) * gates_padded
            tile_decay = (gl.load(whole_ptr + gates + first) - gl.load(whole_ptr + gates + rows)).to(gl.float32)
            tile_decay += gl.load(rest_ptr + gates + first) - gl.load(rest_ptr + gates + rows)
        row_factor, minus_delta, change = row_factors(
            minus_delta, q_length, gl.load(bound_ptr + first), own_bound, key_length, tile_decay, scales_ptr, POWER
        )
    if GATED:
        whole_ptr += kv_sequence.to(gl.int64) * gates_padded
        rest_ptr += kv_sequence.to(gl.int64) * gates_padded
        to_end_ptr += kv_sequence.to(gl.int64) * gates_padded
        reference_whole = gl.load(whole_ptr + first)
        reference_rest = gl.load(rest_ptr + first)

    mbarrier.wait(start_barrier, 0)
    q = q_buffer.reshape([ROWS, D])
    dy = dy_buffer.reshape([ROWS, E])
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    dq = gl.zeros((ROWS, D), gl.float32, DQ)

    if steps_before > 0:
        mbarrier.wait(barriers.index(0), 0)
        scores = warpgroup_mma(q, matrix(k_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(dy, matrix(v_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        grads = odd_power(scores, POWER - 1) * plus_delta(dp, minus_delta, row_factor, FLOAT16)
        if GATED:
            log_decay = (reference_whole - gl.load(whole_ptr + COLUMNS - 1)).to(gl.float32)
            log_decay += reference_rest - gl.load(rest_ptr + COLUMNS - 1)
            grads *= gl.expand_dims(gl.load(to_end_ptr + offsets) * gl.exp2(log_decay), 0)
        mbarrier.wait(barriers.index(1 % STAGES), (1 // STAGES) & 1)
        for step in range(1, steps_before):
            stage = step % STAGES
            last_stage = (step - 1) % STAGES
            scores = warpgroup_mma(q, matrix(k_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dp = warpgroup_mma(dy, matrix(v_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dq = warpgroup_mma(
                gl.convert_layout(grads.to(dtype), LEFT_DQ), matrix(k_buffers, last_stage), dq, is_async=True
            )
            if GATED:
                prefetch(to_end_ptr + (step + 1) * COLUMNS + spread)
                decay = gl.load(to_end_ptr + step * COLUMNS + offsets)
                end_whole = gl.load(whole_ptr + (step + 1) * COLUMNS - 1)
                end_rest = gl.load(rest_ptr + (step + 1) * COLUMNS - 1)
            # No warp reads the tile before the previous one any more: its buffer is free.
            thread_barrier()
            load_keys(
                k_desc, v_desc, batch, kv_head, gl.where(step > 1, step - 2 + STAGES, steps), steps,
                k_buffers, v_buffers, barriers, STAGES,
            )  # fmt: skip
            scores, dp = warpgroup_mma_wait(1, deps=(scores, dp))
            grads = odd_power(scores, POWER - 1) * plus_delta(dp, minus_delta, row_factor, FLOAT16)
            if GATED:
                log_decay = (reference_whole - end_whole).to(gl.float32) + (reference_rest - end_rest)
                grads *= gl.expand_dims(decay * gl.exp2(log_decay), 0)
            mbarrier.wait(barriers.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
            dq, grads = warpgroup_mma_wait(0, deps=(dq, grads))
        dq = warpgroup_mma(
            gl.convert_layout(grads.to(dtype), LEFT_DQ), matrix(k_buffers, (steps_before - 1) % STAGES), dq
        )

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
        mbarrier.wait(barriers.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(q, matrix(k_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(dy, matrix(v_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        columns = step * COLUMNS + offsets
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

    dq *= POWER
    if FLOAT16:
        unscale = gl.load(factor_ptr + sequence.to(gl.int64) * padded + rows) * power_of_two(-change)
        unscale /= gl.max(row_factor, axis=1)
        dq *= gl.expand_dims(gl.convert_layout(unscale, DQ_BY_ROW), 1)
    dq = of_unscaled_queries(dq, q, first, sequence, length, row_term_ptr, scale_ptr, DQ)
    q.store(dq.to(dtype))
    fence_async_shared()
    async_store(dq_desc, [batch, head, first, 0], q_buffer)
    tma.store_wait(0)


@gluon.jit
def load_queries(
    q_desc, dy_desc, batch, head, after, step, steps, tiles, q_buffers, dy_buffers, barriers,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the queries and output gradients of a step: first those after the tile, then the diagonal."""
    COLUMNS: gl.constexpr = q_desc.block_type.shape[2]
    stage = step % STAGES
    wanted = step < steps
    barrier = barriers.index(stage)
    # The last tile of keys has no queries after it.
    member, tile = divide_steps(step, gl.maximum(tiles, 1), GROUP)
    diagonal = step >= GROUP * tiles
    member = gl.where(diagonal, step - GROUP * tiles, member)
    row = gl.where(diagonal, after - COLUMNS, after + tile * COLUMNS)
    mbarrier.expect(barrier, q_desc.block_type.nbytes + dy_desc.block_type.nbytes, pred=wanted)
    async_load(q_desc, [batch, head + member, row, 0], barrier, q_buffers.index(stage), pred=wanted)
    async_load(dy_desc, [batch, head + member, row, 0], barrier, dy_buffers.index(stage), pred=wanted)


@gluon.jit
def key_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dk_desc, dv_desc, column_term_ptr,
    whole_ptr, rest_ptr, from_start_ptr, length, padded, gates_padded, kv_heads,
    GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dv_j and dk_j for a tile of keys (rows here; queries are columns), summed over the query heads that read them,
    and k_j · dk_j."""
    ROWS: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    COLUMNS: gl.constexpr = q_desc.block_type.shape[2]
    E: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = v_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    LEFT_DK: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    LEFT_DV: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    gl.static_assert(ROWS == COLUMNS)

    key_tile, kv_sequence = split_program_id(gl.cdiv(length, ROWS), gl.int32)
    first = key_tile * ROWS
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    head = kv_head * GROUP
    after = first + ROWS
    last = gl.minimum(after, length) - 1
    tiles = gl.maximum(gl.cdiv(length - after, COLUMNS), 0)
    steps_before = GROUP * tiles
    steps = steps_before + GROUP

    k_buffer = gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout)
    v_buffer = gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dy_buffers = gl.allocate_shared_memory(dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout)
    start_barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(start_barrier, count=1)
    barriers = new_barriers(STAGES, 1)
    fence_async_shared()
    mbarrier.expect(start_barrier, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    async_load(k_desc, [batch, kv_head, first, 0], start_barrier, k_buffer)
    async_load(v_desc, [batch, kv_head, first, 0], start_barrier, v_buffer)
    for early in gl.static_range(STAGES):
        load_queries(q_desc, dy_desc, batch, head, after, early, steps, tiles, q_buffers, dy_buffers, barriers, GROUP,
                     STAGES)  # fmt: skip

    offsets = gl.arange(0, COLUMNS, BY_COLUMN)
    rows = first + gl.arange(0, ROWS, BY_ROW)
    minus_delta_ptr += (batch * kv_heads + kv_head).to(gl.int64) * GROUP * padded
    if GATED:
        whole_ptr += kv_sequence.to(gl.int64) * gates_padded
        rest_ptr += kv_sequence.to(gl.int64) * gates_padded
        from_start_ptr += kv_sequence.to(gl.int64) * gates_padded
        reference_whole = gl.load(whole_ptr + last)
        reference_rest = gl.load(rest_ptr + last)

    mbarrier.wait(start_barrier, 0)
    k = k_buffer.reshape([ROWS, D]).load(LEFT)
    v = v_buffer.reshape([ROWS, E])  # in shared memory: no registers are left for it
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    dk = gl.zeros((ROWS, D), gl.float32, DK)
    dv = gl.zeros((ROWS, E), gl.float32, DV)

    if steps_before > 0:
        mbarrier.wait(barriers.index(0), 0)
        scores = warpgroup_mma(k, matrix(q_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, matrix(dy_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        dp += gl.expand_dims(gl.load(minus_delta_ptr + after + offsets), 0)
        factor = odd_power(scores, POWER - 1)
        if GATED:
            log_decay = (gl.load(whole_ptr + after) - reference_whole).to(gl.float32)
            log_decay += gl.load(rest_ptr + after) - reference_rest
            factor *= gl.expand_dims(gl.load(from_start_ptr + after + offsets) * gl.exp2(log_decay), 0)
        weights = factor * scores
        grads = factor * dp
        mbarrier.wait(barriers.index(1 % STAGES), (1 // STAGES) & 1)
        for step in range(1, steps_before):
            member, tile = divide_steps(step, tiles, GROUP)
            start = after + tile * COLUMNS
            stage = step % STAGES
            last_stage = (step - 1) % STAGES
            scores = warpgroup_mma(k, matrix(q_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, matrix(dy_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            dv = warpgroup_mma(
                gl.convert_layout(weights.to(dtype), LEFT_DV), matrix(dy_buffers, last_stage), dv, is_async=True
            )
            dk = warpgroup_mma(
                gl.convert_layout(grads.to(dtype), LEFT_DK), matrix(q_buffers, last_stage), dk, is_async=True
            )
            minus_delta = gl.load(minus_delta_ptr + member * padded + start + offsets)
            if GATED:
                decay = gl.load(from_start_ptr + start + offsets)
                start_whole = gl.load(whole_ptr + start)
                start_rest = gl.load(rest_ptr + start)
            # No warp reads the tile before the previous one any more: its buffer is free.
            thread_barrier()
            load_queries(
                q_desc, dy_desc, batch, head, after, gl.where(step > 1, step - 2 + STAGES, steps), steps, tiles,
                q_buffers, dy_buffers, barriers, GROUP, STAGES,
            )  # fmt: skip
            scores, dp = warpgroup_mma_wait(2, deps=(scores, dp))
            dp += gl.expand_dims(minus_delta, 0)
            factor = odd_power(scores, POWER - 1)
            if GATED:
                log_decay = (start_whole - reference_whole).to(gl.float32) + (start_rest - reference_rest)
                factor *= gl.expand_dims(decay * gl.exp2(log_decay), 0)
            weights = factor * scores
            grads = factor * dp
            mbarrier.wait(barriers.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
            dv, dk, weights, grads = warpgroup_mma_wait(0, deps=(dv, dk, weights, grads))
        stage = (steps_before - 1) % STAGES
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_DV), matrix(dy_buffers, stage), dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(grads.to(dtype), LEFT_DK), matrix(q_buffers, stage), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))

    if GATED:
        row_whole, row_rest = sums_since(whole_ptr, rest_ptr, rows, reference_whole, reference_rest)
        row_decay = gl.exp2(-(row_whole + row_rest))
        dk *= gl.expand_dims(gl.convert_layout(row_decay, gl.SliceLayout(1, DK)), 1)
        dv *= gl.expand_dims(gl.convert_layout(row_decay, gl.SliceLayout(1, DV)), 1)
        columns = first + offsets
        column_whole, column_rest = sums_since(whole_ptr, rest_ptr, columns, reference_whole, reference_rest)
    for member in range(GROUP):
        step = steps_before + member
        stage = step % STAGES
        # With fewer stages than heads, the copies of the later heads have not been started yet.
        if GROUP > 1:
            thread_barrier()
            load_queries(
                q_desc, dy_desc, batch, head, after, gl.where(step > 1, step - 2 + STAGES, steps), steps, tiles,
                q_buffers, dy_buffers, barriers, GROUP, STAGES,
            )  # fmt: skip
        mbarrier.wait(barriers.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(k, matrix(q_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, matrix(dy_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        dp += gl.expand_dims(gl.load(minus_delta_ptr + member * padded + first + offsets), 0)
        factor = odd_power(scores, POWER - 1)
        causal = gl.expand_dims(first + offsets, 0) >= gl.expand_dims(rows, 1)
        if GATED:
            factor *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal, ROWS_LATER=False)
        else:
            factor = gl.where(causal, factor, 0.0)
        weights = gl.convert_layout((factor * scores).to(dtype), LEFT_DV)
        grads = gl.convert_layout((factor * dp).to(dtype), LEFT_DK)
        dv = warpgroup_mma(weights, matrix(dy_buffers, stage), dv, is_async=True)
        dk = warpgroup_mma(grads, matrix(q_buffers, stage), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))

    dk *= POWER
    own = k_buffer.reshape([ROWS, D]).load(DK).to(gl.float32)
    column_term = gl.convert_layout(gl.sum(dk * own, axis=1), BY_ROW)
    gl.store(column_term_ptr + kv_sequence.to(gl.int64) * length + rows, column_term, mask=rows < length)
    k_buffer.reshape([ROWS, D]).store(dk.to(dtype))
    v_buffer.reshape([ROWS, E]).store(dv.to(dtype))
    fence_async_shared()
    async_store(dk_desc, [batch, kv_head, first, 0], k_buffer)
    async_store(dv_desc, [batch, kv_head, first, 0], v_buffer)
    tma.store_wait(0)


def query_gradient(
    q: Tensor, scale: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int,
    gates: Gates | None, *,
    row_gradients: RowGradients | None = None, key_range: KeyRange | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (b, t, h, d) of the unscaled queries and q_i · dq_i (b, h, t), from q and scale of `scale_queries`, dy' and −δ
    of `prepare`; `row_gradients` and `key_range` as in the portable kernel."""
    assert gates is None or gates.tile == TILE
    split = None if gates is None else gates.split
    batch, length, heads, _ = q.shape
    dq = empty_aligned(q, *q.shape)
    row_term = q.new_empty(batch, heads, length, dtype=torch.float32)
    grid = two_axis_grid(ceil_div(length, TILE), batch * heads)
    launch(
        query_gradient_kernel, grid,
        gluon_head_major(q, TILE), gluon_head_major(k, TILE), gluon_head_major(v, TILE), gluon_head_major(dy, TILE),
        minus_delta, gluon_head_major(dq, TILE), row_term, scale, split and split.whole, split and split.rest,
        gates and gates.to_end, key_range and key_range.bound, row_gradients and row_gradients.length,
        row_gradients and row_gradients.factor, row_gradients and row_gradients.scales, length, minus_delta.shape[-1],
        gates.to_end.shape[-1] if gates else 0, heads, GROUP=heads // k.shape[2], POWER=power, GATED=gates is not None,
        STAGES=RING, FLAT=len(grid) == 1, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return dq, row_term


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor, power: int,
    gates: Gates | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dk (b, t, h_kv, d), dv (b, t, h_kv, e) and k_j · dk_j (b, h_kv, t); arguments as for `query_gradient`."""
    assert gates is None or gates.tile == TILE
    split = None if gates is None else gates.split
    batch, length, kv_heads, _ = k.shape
    dk, dv = empty_aligned(k, *k.shape), empty_aligned(v, *v.shape)
    column_term = k.new_empty(batch, kv_heads, length, dtype=torch.float32)
    launch(
        key_gradient_kernel, flat_grid(ceil_div(length, TILE), batch * kv_heads),
        gluon_head_major(q, TILE), gluon_head_major(k, TILE), gluon_head_major(v, TILE), gluon_head_major(dy, TILE),
        minus_delta, gluon_head_major(dk, TILE), gluon_head_major(dv, TILE), column_term,
        split and split.whole, split and split.rest, gates and gates.from_start,
        length, minus_delta.shape[-1], gates.from_start.shape[-1] if gates else 0, kv_heads,
        GROUP=q.shape[2] // kv_heads, POWER=power, GATED=gates is not None, STAGES=RING, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return dk, dv, column_term
