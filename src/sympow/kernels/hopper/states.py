"""States of chunks on Hopper, heads of 128, p = 2: the sums that they are made of, and what queries and keys read.

With S_i the slice of a state that belongs to entry i of the key (`states.quadratic`), `update` computes the sums of
chunks, S_iᵀ = Σ (y * x_i)ᵀ x for entries i, like the kernel of that name for any GPU. With D for the gradient of the
states, the sums over later queries, two products serve the forward and the backward pass:

    y's numerator   features_times_state(q, S) = Σ_i q_i (q S_iᵀ) = φ(q) S
    dv              features_times_state(k, D, keys=True)
    dq / p          vector_times_state(q, dy, S, −δ) = Σ_i q_i (dy S_i) − δ q Z
    dk / p          vector_times_state(k, v, D, keys=True), whose Z has the weights −δ

Queries read the state at the start of their chunk, keys (`keys`) the gradient of that at its end. Decays between a row
and that boundary are left to the kernels that start from these products (`forward`, `backward`). Writing and reading
them costs a few per cent of a product; in return each kernel has the registers to itself that its products need.

Either is one matrix product per entry i and half of its inner dimension, whose left operand, the row or vector times
x_i, is computed in registers. A CTA owns 256 rows that read the same state, in tiles of 64: query heads that share a
key head, or consecutive tokens. One warp copies tiles of the state to shared memory, and two warpgroups own two tiles
of rows each: the operand of one tile is computed while the product of the other runs. With 128 rows per CTA, the copies
would need more bandwidth than the L2 cache has.

In a sum, a CTA owns as many entries as fit in registers. One warp copies tiles of x and y to shared memory; each of two
warpgroups owns half of the rows e of all entries, so that it reads its half of yᵀ once for several products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
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

from sympow.kernels.attention.forward import query_normalizer
from sympow.kernels.common import divide_steps, split_program_id
from sympow.kernels.hopper.common import (
    async_load,
    async_store,
    free_stage,
    gluon_blocks_of,
    gluon_head_major,
    matrix,
    new_barriers,
    thread_barrier,
)
from sympow.kernels.hopper.forward import COPY_REGISTERS, REGISTERS, START_REGISTERS
from sympow.kernels.launch import aligned, blocks_of, ceil_div, flat_grid, head_major, launch
from sympow.kernels.states.quadratic import ChunkStates

# Rows per tile, tiles of rows per CTA of a product, and tiles of the state in its shared memory.
TILE, TILES, RING = 64, 4, 8
# Entries per CTA of a sum times columns of each, and tiles of x and of y in its shared memory.
WIDTH, SUM_RING = 256, 4

# Sums of chunks -------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_tokens(
    x_desc, y_desc, batch, head, chunk_start, tiles, first_column, buffers, ready, empty,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = y_desc.block_type.shape[2]
    x_buffers, y_buffers = buffers
    for step in range(GROUP * tiles):
        member, tile = divide_steps(step, tiles, GROUP)
        stage = step % STAGES
        barrier = ready.index(stage)
        row = chunk_start + tile * TOKENS
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
        async_load(x_desc, [batch, head + member, row, first_column], barrier, x_buffers.index(stage))
        async_load(y_desc, [batch, head + member, row, 0], barrier, y_buffers.index(stage))


@gluon.jit
def _load_entries(pointers, TOKENS: gl.constexpr, ENTRIES: gl.constexpr):
    """Consecutive entries of a tile of tokens."""
    loaded = ()
    for n in gl.static_range(ENTRIES):
        loaded = loaded + (gl.load(pointers + n * TOKENS),)
    return loaded


@gluon.jit
def _update_rows(
    y_desc, out_desc, entries_ptr, place, tiles, tile_stride, head_stride, out_buffers, buffers, ready, empty,
    MEMBER: gl.constexpr, COLUMNS: gl.constexpr, ENTRIES: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half of the rows of S_iᵀ for ENTRIES entries i."""
    state, out_entry, out_column = place
    TOKENS: gl.constexpr = y_desc.block_type.shape[2]
    ROWS: gl.constexpr = y_desc.block_type.shape[3] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    x_buffers, y_buffers = buffers
    accs = (gl.zeros((ROWS, COLUMNS), gl.float32, ACC),) * ENTRIES
    pointers = entries_ptr + gl.arange(0, TOKENS, gl.SliceLayout(0, LEFT))
    ahead = _load_entries(pointers, TOKENS, ENTRIES)
    steps = GROUP * tiles
    for step in range(steps):
        stage = step % STAGES
        entries = ahead
        # Loaded a step ahead: they do not pass through shared memory.
        member, tile = divide_steps(gl.minimum(step + 1, steps - 1), tiles, GROUP)
        ahead = _load_entries(pointers + member * head_stride + tile * tile_stride, TOKENS, ENTRIES)
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        y = matrix(y_buffers, stage).slice(MEMBER * ROWS, ROWS, dim=1).permute((1, 0)).load(LEFT)
        x = matrix(x_buffers, stage)
        sums = ()
        for n in gl.static_range(ENTRIES):
            sums = sums + (warpgroup_mma(y * gl.expand_dims(entries[n], 0), x, accs[n], is_async=True),)
        accs = warpgroup_mma_wait(0, deps=sums)
        free_stage(empty, stage)
    buffer = out_buffers.index(MEMBER)
    for n in gl.static_range(ENTRIES):
        buffer.reshape([ROWS, COLUMNS]).store(accs[n].to(out_desc.dtype))
        fence_async_shared()
        thread_barrier()
        async_store(out_desc, [state, out_entry + n, MEMBER * ROWS, out_column], buffer)
        tma.store_wait(0)
        thread_barrier()


@gluon.jit
def hopper_update_kernel(
    x_desc, y_desc, out_desc, decayed_transposed_ptr, all_tiles, kv_heads, chunk_count, state_count, first_chunk,
    first_state, chunk, first_entry, first_column, out_column, groups,
    GROUP: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """S_iᵀ of a chunk for ENTRIES entries i: (e, COLUMNS) each."""
    dtype: gl.constexpr = x_desc.dtype
    TOKENS: gl.constexpr = y_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[3]
    program = gl.program_id(0)
    group = program % groups
    number = program // groups % chunk_count
    kv_sequence = program // groups // chunk_count
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    tiles = chunk // TOKENS
    chunk_start = (number + first_chunk) * chunk
    state = kv_sequence * state_count + number + first_state
    tile_stride = D * TOKENS
    head_stride = all_tiles.to(gl.int64) * tile_stride
    entries_ptr = decayed_transposed_ptr + kv_sequence.to(gl.int64) * GROUP * head_stride
    entries_ptr += (number + first_chunk).to(gl.int64) * tiles * tile_stride + (first_entry + group * ENTRIES) * TOKENS

    x_buffers = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    y_buffers = gl.allocate_shared_memory(dtype, [STAGES] + y_desc.block_type.shape, y_desc.layout)
    out_buffers = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    ready = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    thread_barrier()
    buffers = (x_buffers, y_buffers)
    place = (state, group * ENTRIES, out_column)
    gl.warp_specialize([
        (_update_rows, (y_desc, out_desc, entries_ptr, place, tiles, tile_stride, head_stride, out_buffers, buffers,
                        ready, empty, gl.constexpr(0), COLUMNS, ENTRIES, GROUP, STAGES)),
        (_update_rows, (y_desc, out_desc, entries_ptr, place, tiles, tile_stride, head_stride, out_buffers, buffers,
                        ready, empty, gl.constexpr(1), COLUMNS, ENTRIES, GROUP, STAGES)),
        (_copy_tokens, (x_desc, y_desc, batch, kv_head * GROUP, chunk_start, tiles, first_column, buffers, ready, empty,
                        GROUP, STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def update(
    x: Tensor, y: Tensor, decayed_transposed: Tensor, out: Tensor, where: tuple[int, ...], first_entry: int,
    columns: int, scales: None = None,
) -> None:  # fmt: skip
    """As `states.quadratic.update`, of bfloat16, which has no scales."""
    batch, _, heads, dim = x.shape
    kv_heads, value_dim = out.shape[1], out.shape[4]
    entries = WIDTH // columns
    groups = out.shape[3] // entries
    out_desc = gluon_blocks_of(out.flatten(0, 2), [1, 1, value_dim // 2, columns])
    launch(
        hopper_update_kernel, flat_grid(groups, where[0], batch * kv_heads),
        gluon_head_major(x, TILE, columns), gluon_head_major(y, TILE), out_desc, decayed_transposed,
        decayed_transposed.shape[2], kv_heads, *where, first_entry, dim - columns, out.shape[-1] - columns, groups,
        GROUP=heads // kv_heads, D=dim, ENTRIES=entries, STAGES=SUM_RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip


# Products of rows with states -----------------------------------------------------------------------------------------


@gluon.jit
def _locate_tile(place, tile, GROUP: gl.constexpr):
    """Query head and first row of a tile of the CTA, and whether the tile lies in the chunk."""
    kv_head, chunk_start, chunk, first_tile = place
    index = first_tile + tile
    offset = index // GROUP * 64
    return kv_head * GROUP + index % GROUP, chunk_start + offset, offset < chunk


@gluon.jit
def _copy_half(desc, state, row, column, step, buffers, ready, empty, COUNT: gl.constexpr, STAGES: gl.constexpr):
    """Copies the tile at (row, column) of each of COUNT slices of a state; returns the next step."""
    for n in range(COUNT):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
        async_load(desc, [state, n, row, column], ready.index(stage), buffers.index(stage))
        step += 1
    return step


@gluon.jit
def _copy_for_features(
    first_half_desc, second_half_desc, state, buffers, ready, empty,
    HALF_DIM: gl.constexpr, SECOND_HALF: gl.constexpr, SECOND_COLUMN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    step = _copy_half(first_half_desc, state, 0, 0, step, buffers, ready, empty, HALF_DIM, STAGES)
    step = _copy_half(first_half_desc, state, 0, HALF_DIM, step, buffers, ready, empty, HALF_DIM, STAGES)
    _copy_half(second_half_desc, state, 0, SECOND_COLUMN, step, buffers, ready, empty, SECOND_HALF, STAGES)


@gluon.jit
def _copy_for_vectors(
    first_half_desc, second_half_desc, normalizer_desc, x_desc, batch, place, state, buffers, ready, empty,
    HALF_DIM: gl.constexpr, SECOND_HALF: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for half in gl.static_range(2):
        step = _copy_half(first_half_desc, state, half * HALF_DIM, 0, step, buffers, ready, empty, HALF_DIM, STAGES)
        step = _copy_half(second_half_desc, state, half * HALF_DIM, 0, step, buffers, ready, empty, SECOND_HALF, STAGES)
    # Last, the two halves of Z and the four tiles of x.
    for n in gl.static_range(6):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), first_half_desc.block_type.nbytes)
        if n < 2:
            async_load(normalizer_desc, [0, state, n * HALF_DIM, 0], ready.index(stage), buffers.index(stage))
        else:
            head, row, _ = _locate_tile(place, n - 2, GROUP)
            async_load(x_desc, [batch, head, row, 0], ready.index(stage), buffers.index(stage))
        step += 1


@gluon.jit
def _add_products(
    upper, lower, left_upper, left_lower, upper_ptr, lower_ptr, first, step, buffers, ready, empty,
    COUNT: gl.constexpr, DIM: gl.constexpr, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """upper and lower plus Σ_i (left * x_i) T_i over COUNT entries i from `first` on, and the next step."""
    next_upper = gl.load(upper_ptr + first)
    next_lower = gl.load(lower_ptr + first)
    for n in range(COUNT):
        stage = step % STAGES
        right = matrix(buffers, stage)
        if TRANSPOSED:
            right = right.permute((1, 0))
        following = gl.minimum(first + n + 1, DIM - 1)
        operand = left_upper * gl.expand_dims(next_upper, 1)
        next_upper = gl.load(upper_ptr + following)
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        upper = warpgroup_mma(operand, right, upper, is_async=True)
        operand = left_lower * gl.expand_dims(next_lower, 1)
        next_lower = gl.load(lower_ptr + following)
        lower = warpgroup_mma(operand, right, lower, is_async=True)
        upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
        free_stage(empty, stage)
        step += 1
    return upper, lower, step


@gluon.jit
def _store_tile(out_ptr, acc, sequence, row, inside, length, N: gl.constexpr, ACC: gl.constexpr):
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, N, gl.SliceLayout(0, ACC))
    pointers = out_ptr + (sequence.to(gl.int64) * length + gl.expand_dims(rows, 1)) * N + gl.expand_dims(columns, 0)
    gl.store(pointers, acc, mask=gl.expand_dims((rows < length) & inside, 1))


@gluon.jit
def _feature_rows(
    place, batch, heads, length, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, x_buffers, x_ready, buffers,
    ready, empty, MEMBER: gl.constexpr, D: gl.constexpr, E: gl.constexpr, SECOND_HALF: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """φ(x) S for the two tiles of rows of one warpgroup."""
    HALF_DIM: gl.constexpr = D // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LEFT)
    head_upper, row_upper, inside_upper = _locate_tile(place, 2 * MEMBER, GROUP)
    head_lower, row_lower, inside_lower = _locate_tile(place, 2 * MEMBER + 1, GROUP)
    rows = gl.arange(0, 64, ROW)
    x_ptr += batch.to(gl.int64) * x_stride_b
    upper_ptr = x_ptr + head_upper * x_stride_h + gl.minimum(row_upper + rows, length - 1).to(gl.int64) * x_stride_t
    lower_ptr = x_ptr + head_lower * x_stride_h + gl.minimum(row_lower + rows, length - 1).to(gl.int64) * x_stride_t
    upper = gl.zeros((64, E), gl.float32, ACC)
    lower = gl.zeros((64, E), gl.float32, ACC)
    mbarrier.wait(x_ready, 0)
    left_upper = matrix(x_buffers, 4 * MEMBER).load(LEFT)
    left_lower = matrix(x_buffers, 4 * MEMBER + 2).load(LEFT)
    step = 0
    upper, lower, step = _add_products(upper, lower, left_upper, left_lower, upper_ptr, lower_ptr, 0, step, buffers,
                                       ready, empty, HALF_DIM, D, True, STAGES)  # fmt: skip
    # S is symmetric in its two feature indices: the block with i in the upper and a in the lower half is not read, and
    # its mirror image counts twice.
    left_upper = matrix(x_buffers, 4 * MEMBER + 1).load(LEFT)
    left_lower = matrix(x_buffers, 4 * MEMBER + 3).load(LEFT)
    left_upper += left_upper
    left_lower += left_lower
    upper, lower, step = _add_products(upper, lower, left_upper, left_lower, upper_ptr, lower_ptr, 0, step, buffers,
                                       ready, empty, HALF_DIM, D, True, STAGES)  # fmt: skip
    left_upper = matrix(x_buffers, 4 * MEMBER + 1).load(LEFT)
    left_lower = matrix(x_buffers, 4 * MEMBER + 3).load(LEFT)
    upper, lower, step = _add_products(upper, lower, left_upper, left_lower, upper_ptr, lower_ptr, HALF_DIM, step,
    buffers,
                                       ready, empty, SECOND_HALF, D, True, STAGES)  # fmt: skip
    _store_tile(out_ptr, upper, batch * heads + head_upper, row_upper, inside_upper, length, E, ACC)
    _store_tile(out_ptr, lower, batch * heads + head_lower, row_lower, inside_lower, length, E, ACC)


@gluon.jit
def _place(chunk, chunks, first_chunk, state_count, first_state, groups, kv_heads):
    """Of a CTA: batch, state index, and its `place` for `_locate_tile`."""
    program = gl.program_id(0)
    group = program % groups
    number = program // groups % chunks
    kv_sequence = program // groups // chunks
    state = kv_sequence * state_count + first_state + number
    place = (kv_sequence % kv_heads, (first_chunk + number) * chunk, chunk, group * 4)
    return kv_sequence // kv_heads, state, place


@gluon.jit
def features_times_state_kernel(
    x_desc, first_half_desc, second_half_desc, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, length, heads, chunk,
    chunks, first_chunk, state_count, first_state, groups,
    GROUP: gl.constexpr, D: gl.constexpr, E: gl.constexpr, SECOND_HALF: gl.constexpr, SECOND_COLUMN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """φ(x) S of 256 rows."""
    dtype: gl.constexpr = x_desc.dtype
    HALF_DIM: gl.constexpr = D // 2
    batch, state, place = _place(chunk, chunks, first_chunk, state_count, first_state, groups, heads // GROUP)
    x_buffers = gl.allocate_shared_memory(dtype, [8] + x_desc.block_type.shape, x_desc.layout)
    buffers = gl.allocate_shared_memory(dtype, [STAGES] + first_half_desc.block_type.shape, first_half_desc.layout)
    x_ready = new_barriers(1, 1)
    ready = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(x_ready.index(0), 8 * x_desc.block_type.nbytes)
    for n in gl.static_range(8):
        head, row, _ = _locate_tile(place, n // 2, GROUP)
        async_load(x_desc, [batch, head, row, n % 2 * HALF_DIM], x_ready.index(0), x_buffers.index(n))
    gl.warp_specialize([
        (_feature_rows, (place, batch, heads, length, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, x_buffers,
                       x_ready.index(0), buffers, ready, empty, gl.constexpr(0), D, E, SECOND_HALF, GROUP, STAGES)),
        (_feature_rows, (place, batch, heads, length, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, x_buffers,
                       x_ready.index(0), buffers, ready, empty, gl.constexpr(1), D, E, SECOND_HALF, GROUP, STAGES)),
        (_copy_for_features, (first_half_desc, second_half_desc, state, buffers, ready, empty, HALF_DIM, SECOND_HALF,
        SECOND_COLUMN, STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


@gluon.jit
def _wait_for(step, buffers, ready, STAGES: gl.constexpr):
    """The tile that is copied at a step, once it has arrived."""
    mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
    return matrix(buffers, step % STAGES)


@gluon.jit
def _row_factors(factor_ptr, state_share_ptr, sequence, row, length, padded, ROW: gl.constexpr):
    """Factors of a tile of rows, and which rows see the state."""
    rows = row + gl.arange(0, 64, ROW)
    factor = gl.load(factor_ptr + sequence.to(gl.int64) * padded + rows, mask=rows < length, other=0.0)
    state_share = gl.load(state_share_ptr + sequence.to(gl.int64) * length + rows, mask=rows < length, other=0.0)
    return factor, state_share


@gluon.jit
def _vector_rows(
    place, batch, heads, length, padded, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr, state_share_ptr,
    out_ptr, z_buffers, z_ready, buffers, ready, empty, MEMBER: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    SECOND_HALF: gl.constexpr, GROUP: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Σ_i x_i (z S_i) + f x Z for the two tiles of rows of one warpgroup."""
    HALF_DIM: gl.constexpr = D // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LEFT)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    head_upper, row_upper, inside_upper = _locate_tile(place, 2 * MEMBER, GROUP)
    head_lower, row_lower, inside_lower = _locate_tile(place, 2 * MEMBER + 1, GROUP)
    rows = gl.arange(0, 64, ROW)
    x_ptr += batch.to(gl.int64) * x_stride_b
    upper_ptr = x_ptr + head_upper * x_stride_h + gl.minimum(row_upper + rows, length - 1).to(gl.int64) * x_stride_t
    lower_ptr = x_ptr + head_lower * x_stride_h + gl.minimum(row_lower + rows, length - 1).to(gl.int64) * x_stride_t
    upper = gl.zeros((64, D), gl.float32, ACC)
    lower = gl.zeros((64, D), gl.float32, ACC)
    mbarrier.wait(z_ready, 0)
    step = 0
    for half in gl.static_range(2):
        left_upper = matrix(z_buffers, 4 * MEMBER + half).load(LEFT)
        left_lower = matrix(z_buffers, 4 * MEMBER + 2 + half).load(LEFT)
        upper, lower, step = _add_products(upper, lower, left_upper, left_lower, upper_ptr, lower_ptr, 0, step, buffers,
                                           ready, empty, HALF_DIM + SECOND_HALF, D, False, STAGES)  # fmt: skip
    # f x Z, its left operand f x rounded like those above.
    x_upper = _wait_for(step + 2 + 2 * MEMBER, buffers, ready, STAGES)
    x_lower = _wait_for(step + 3 + 2 * MEMBER, buffers, ready, STAGES)
    for half in gl.static_range(2):
        normalizer = _wait_for(step + half, buffers, ready, STAGES)
        left_upper = x_upper.slice(half * HALF_DIM, HALF_DIM, dim=1).load(LEFT)
        left_lower = x_lower.slice(half * HALF_DIM, HALF_DIM, dim=1).load(LEFT)
        if FACTORS:
            factor, _ = _row_factors(
                factor_ptr, state_share_ptr, batch * heads + head_upper, row_upper, length, padded, ROW
            )
            left_upper = (left_upper.to(gl.float32) * gl.expand_dims(factor, 1)).to(left_upper.dtype)
            factor, _ = _row_factors(
                factor_ptr, state_share_ptr, batch * heads + head_lower, row_lower, length, padded, ROW
            )
            left_lower = (left_lower.to(gl.float32) * gl.expand_dims(factor, 1)).to(left_lower.dtype)
        upper = warpgroup_mma(left_upper, normalizer, upper)
        lower = warpgroup_mma(left_lower, normalizer, lower)
    if FACTORS:
        _, state_share = _row_factors(
            factor_ptr, state_share_ptr, batch * heads + head_upper, row_upper, length, padded, ACC_ROW
        )
        upper = gl.where(gl.expand_dims(state_share == 0, 1), 0.0, upper)
        _, state_share = _row_factors(
            factor_ptr, state_share_ptr, batch * heads + head_lower, row_lower, length, padded, ACC_ROW
        )
        lower = gl.where(gl.expand_dims(state_share == 0, 1), 0.0, lower)
    _store_tile(out_ptr, upper, batch * heads + head_upper, row_upper, inside_upper, length, D, ACC)
    _store_tile(out_ptr, lower, batch * heads + head_lower, row_lower, inside_lower, length, D, ACC)


@gluon.jit
def vector_times_state_kernel(
    z_desc, first_half_desc, second_half_desc, normalizer_desc, x_desc, x_ptr, x_stride_b, x_stride_t, x_stride_h,
    factor_ptr, state_share_ptr, out_ptr, length, padded, heads, chunk, chunks, first_chunk, state_count, first_state,
    groups, GROUP: gl.constexpr, D: gl.constexpr, E: gl.constexpr, SECOND_HALF: gl.constexpr, FACTORS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Σ_i x_i (z S_i) + f x Z of 256 rows."""
    dtype: gl.constexpr = z_desc.dtype
    HALF_DIM: gl.constexpr = D // 2
    batch, state, place = _place(chunk, chunks, first_chunk, state_count, first_state, groups, heads // GROUP)
    z_buffers = gl.allocate_shared_memory(dtype, [8] + z_desc.block_type.shape, z_desc.layout)
    buffers = gl.allocate_shared_memory(dtype, [STAGES] + first_half_desc.block_type.shape, first_half_desc.layout)
    z_ready = new_barriers(1, 1)
    ready = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(z_ready.index(0), 8 * z_desc.block_type.nbytes)
    for n in gl.static_range(8):
        head, row, _ = _locate_tile(place, n // 2, GROUP)
        async_load(z_desc, [batch, head, row, n % 2 * (E // 2)], z_ready.index(0), z_buffers.index(n))
    gl.warp_specialize([
        (_vector_rows, (place, batch, heads, length, padded, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr,
                          state_share_ptr, out_ptr, z_buffers, z_ready.index(0), buffers, ready, empty, gl.constexpr(0),
                          D, E, SECOND_HALF, GROUP, FACTORS, STAGES)),
        (_vector_rows, (place, batch, heads, length, padded, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr,
                          state_share_ptr, out_ptr, z_buffers, z_ready.index(0), buffers, ready, empty, gl.constexpr(1),
                          D, E, SECOND_HALF, GROUP, FACTORS, STAGES)),
        (_copy_for_vectors, (first_half_desc, second_half_desc, normalizer_desc, x_desc, batch, place, state, buffers,
        ready, empty,
                              HALF_DIM, SECOND_HALF, GROUP, STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


class _Reads(NamedTuple):
    """Which chunks read which states: the last six integers of both kernels."""

    chunk: int
    chunks: int
    first_chunk: int
    state_count: int
    first_state: int
    groups: int


def _reads(x: Tensor, states: ChunkStates, *, keys: bool) -> _Reads:
    """A chunk's queries read the state at its start, and the gradients of its keys that at its end."""
    count, chunk = states.count, states.chunk
    # No keys come before boundary 0, and no queries after the last one.
    first_state = 1 if keys and states.first == 0 else 0
    first_chunk = states.first + first_state - (1 if keys else 0)
    chunks = min(count - first_state, ceil_div(x.shape[1], chunk) - first_chunk)
    groups = ceil_div(x.shape[2] // states.first_half.shape[1] * chunk // TILE, TILES)
    return _Reads(chunk, chunks, first_chunk, count, first_state, groups)


def features_times_state(x: Tensor, states: ChunkStates, *, keys: bool = False) -> Tensor:
    """φ(x) S: (b, h, t, e) float32, undefined for the rows of chunks that no state belongs to.

    Args:
        x: queries (b, t, h, d), which read the state at the start of their chunk, or
        keys: keys, which read that at its end.
    """
    batch, length, heads, dim = x.shape
    kv_heads, value_dim = states.first_half.shape[1], states.first_half.shape[4]
    out = x.new_empty(batch, heads, length, value_dim, dtype=torch.float32)
    x = aligned(x)
    reads = _reads(x, states, keys=keys)
    tile = [1, 1, value_dim, dim // 2]
    launch(
        features_times_state_kernel, flat_grid(reads.groups, reads.chunks, batch * kv_heads),
        gluon_head_major(x, TILE, dim // 2), gluon_blocks_of(states.first_half.flatten(0, 2), tile),
        gluon_blocks_of(states.second_half.flatten(0, 2), tile), x, x.stride(0), x.stride(1), x.stride(2), out, length,
        heads, *reads,
        GROUP=heads // kv_heads, D=dim, E=value_dim, SECOND_HALF=states.second_half.shape[3],
        SECOND_COLUMN=states.second_half.shape[-1] - dim // 2, STAGES=RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def vector_times_state(
    x: Tensor, z: Tensor, states: ChunkStates, factor: Tensor | None = None, state_share: Tensor | None = None, *,
    keys: bool = False,
) -> Tensor:  # fmt: skip
    """Σ_i x_i (z S_i) + f x Z: (b, h, t, d) float32, undefined for the rows of chunks that no state belongs to.

    Args:
        x, keys: as in `features_times_state`.
        z: output gradients (b, t, h, e), or values.
        states: with all columns a.
        factor: f for each row (b, h, ≥ t) float32; None: 1.
        state_share: φ(x) Z (b, h, t) float32, with `factor`: rows where it is 0 do not see the state, and get 0.
    """
    batch, length, heads, dim = x.shape
    kv_heads, value_dim = states.first_half.shape[1], states.first_half.shape[4]
    assert states.second_half.shape[-1] == dim
    out = x.new_empty(batch, heads, length, dim, dtype=torch.float32)
    x, z = aligned(x), aligned(z)
    reads = _reads(x, states, keys=keys)
    tile = [1, 1, value_dim // 2, dim]
    normalizer = states.normalizer.flatten(0, 2)[None]
    launch(
        vector_times_state_kernel, flat_grid(reads.groups, reads.chunks, batch * kv_heads),
        gluon_head_major(z, TILE, value_dim // 2), gluon_blocks_of(states.first_half.flatten(0, 2), tile),
        gluon_blocks_of(states.second_half.flatten(0, 2), tile), gluon_blocks_of(normalizer, [1, 1, dim // 2, dim]),
        gluon_head_major(x, TILE), x, x.stride(0), x.stride(1), x.stride(2), factor, state_share, out,
        length, 0 if factor is None else factor.shape[-1], heads, *reads,
        GROUP=heads // kv_heads, D=dim, E=value_dim, SECOND_HALF=states.second_half.shape[3],
        FACTORS=factor is not None, STAGES=RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit
def state_share_kernel(
    q_desc, normalizer_desc, state_share_ptr, length, heads, tiles, chunk, state_count, first_boundary,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """φ(q) Z for a tile of queries, 0 in rows that see no state."""
    tile, sequence = split_program_id(tiles)
    batch, head = sequence // heads, sequence % heads
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    denominator = tl.zeros((ROWS,), tl.float32)
    boundary = first // chunk
    if boundary >= first_boundary:
        q = q_desc.load([batch.to(tl.int32), head.to(tl.int32), first, 0]).reshape(ROWS, D)
        state = ((batch * heads + head) // GROUP * state_count + boundary - first_boundary).to(tl.int32)
        found, unseen = query_normalizer(q, normalizer_desc.load([state, 0, 0]).reshape(D, D), "tf32")
        denominator = tl.where(unseen, 0.0, found)
    tl.store(state_share_ptr + sequence * length + rows, denominator, mask=rows < length)


def state_shares(q: Tensor, states: ChunkStates, rows: int = 128) -> Tensor:
    """φ(q) Z of each query and the state at the start of its chunk, 0 where it sees none: (b, h, t) float32.

    Args:
        q: as scaled by `scale_queries`, (b, t, h, d).
    """
    batch, length, heads, dim = q.shape
    state_share = q.new_empty(batch, heads, length, dtype=torch.float32)
    tiles = ceil_div(length, rows)
    launch(
        state_share_kernel, flat_grid(tiles, batch * heads),
        head_major(q, (rows, dim)), blocks_of(states.normalizer.flatten(0, 2), [1, dim, dim]), state_share,
        length, heads, tiles, states.chunk, states.count, states.first,
        GROUP=heads // states.first_half.shape[1], D=dim, ROWS=rows, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return state_share
