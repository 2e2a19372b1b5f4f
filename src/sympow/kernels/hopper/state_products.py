"""Products of queries, keys, values and output gradients with the states of chunks on Hopper, heads of 128, p = 2.

With S_i the slice of a state that belongs to entry i of the key (`states.quadratic`), there are two such sums:
    `query_states`:     Σ_i x_i (x S_iᵀ) = φ(x) S. With x = q it is the numerator of y; with x = k, and with the sums
                        over later queries D for S, it is dv.
    `gradient_states`:  Σ_i x_i (z S_i). With x = q and z = dy it is dq; with x = k, z = v and D for S it is dk.
Either is one matrix product per entry i and half of its inner dimension, whose left operand, x or z times x_i, is
computed in registers.

A CTA owns 256 rows that read the same state, in tiles of 64: query heads that share a key head, or consecutive tokens.
One warp copies tiles of the state to shared memory, and two warpgroups own two tiles of rows each: the operand of one
tile is computed while the product of the other runs. With 128 rows per CTA, the copies would need more bandwidth than
the L2 cache has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sympow.kernels.hopper.common import (
    async_load,
    blocks_of,
    free_stage,
    head_major,
    matrix,
    new_barriers,
    thread_barrier,
)
from sympow.kernels.hopper.forward import COPY_REGISTERS, REGISTERS, START_REGISTERS
from sympow.kernels.launch import aligned, ceil_div, flat_grid, launch
from sympow.kernels.states.quadratic import ChunkStates

# Rows per tile, tiles per CTA, and tiles of the state in shared memory.
TILE, TILES, RING = 64, 4, 8


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
def _copy_for_query(
    low_desc, high_desc, state, buffers, ready, empty,
    HALF_DIM: gl.constexpr, HIGH: gl.constexpr, HIGH_COLUMN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    step = _copy_half(low_desc, state, 0, 0, step, buffers, ready, empty, HALF_DIM, STAGES)
    step = _copy_half(low_desc, state, 0, HALF_DIM, step, buffers, ready, empty, HALF_DIM, STAGES)
    _copy_half(high_desc, state, 0, HIGH_COLUMN, step, buffers, ready, empty, HIGH, STAGES)


@gluon.jit
def _copy_for_gradient(
    low_desc, high_desc, normalizer_desc, x_desc, batch, place, state, buffers, ready, empty,
    HALF_DIM: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for half in gl.static_range(2):
        step = _copy_half(low_desc, state, half * HALF_DIM, 0, step, buffers, ready, empty, HALF_DIM, STAGES)
        step = _copy_half(high_desc, state, half * HALF_DIM, 0, step, buffers, ready, empty, HIGH, STAGES)
    # Last, the two halves of Z and the four tiles of x.
    for n in gl.static_range(6):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), low_desc.block_type.nbytes)
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
def _query_rows(
    place, batch, heads, length, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, x_buffers, x_ready, buffers,
    ready, empty, MEMBER: gl.constexpr, D: gl.constexpr, E: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
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
                                       ready, empty, HIGH, D, True, STAGES)  # fmt: skip
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
def query_states_kernel(
    x_desc, low_desc, high_desc, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, length, heads, chunk,
    chunks, first_chunk, state_count, first_state, groups,
    GROUP: gl.constexpr, D: gl.constexpr, E: gl.constexpr, HIGH: gl.constexpr, HIGH_COLUMN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """φ(x) S of 256 rows."""
    dtype: gl.constexpr = x_desc.dtype
    HALF_DIM: gl.constexpr = D // 2
    batch, state, place = _place(chunk, chunks, first_chunk, state_count, first_state, groups, heads // GROUP)
    x_buffers = gl.allocate_shared_memory(dtype, [8] + x_desc.block_type.shape, x_desc.layout)
    buffers = gl.allocate_shared_memory(dtype, [STAGES] + low_desc.block_type.shape, low_desc.layout)
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
        (_query_rows, (place, batch, heads, length, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, x_buffers,
                       x_ready.index(0), buffers, ready, empty, gl.constexpr(0), D, E, HIGH, GROUP, STAGES)),
        (_query_rows, (place, batch, heads, length, x_ptr, x_stride_b, x_stride_t, x_stride_h, out_ptr, x_buffers,
                       x_ready.index(0), buffers, ready, empty, gl.constexpr(1), D, E, HIGH, GROUP, STAGES)),
        (_copy_for_query, (low_desc, high_desc, state, buffers, ready, empty, HALF_DIM, HIGH, HIGH_COLUMN, STAGES)),
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
def _gradient_rows(
    place, batch, heads, length, padded, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr, state_share_ptr,
    out_ptr, z_buffers, z_ready, buffers, ready, empty, MEMBER: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    HIGH: gl.constexpr, GROUP: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
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
                                           ready, empty, HALF_DIM + HIGH, D, False, STAGES)  # fmt: skip
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
def gradient_states_kernel(
    z_desc, low_desc, high_desc, normalizer_desc, x_desc, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr,
    state_share_ptr, out_ptr, length, padded, heads, chunk, chunks, first_chunk, state_count, first_state, groups,
    GROUP: gl.constexpr, D: gl.constexpr, E: gl.constexpr, HIGH: gl.constexpr, FACTORS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Σ_i x_i (z S_i) + f x Z of 256 rows."""
    dtype: gl.constexpr = z_desc.dtype
    HALF_DIM: gl.constexpr = D // 2
    batch, state, place = _place(chunk, chunks, first_chunk, state_count, first_state, groups, heads // GROUP)
    z_buffers = gl.allocate_shared_memory(dtype, [8] + z_desc.block_type.shape, z_desc.layout)
    buffers = gl.allocate_shared_memory(dtype, [STAGES] + low_desc.block_type.shape, low_desc.layout)
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
        (_gradient_rows, (place, batch, heads, length, padded, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr,
                          state_share_ptr, out_ptr, z_buffers, z_ready.index(0), buffers, ready, empty, gl.constexpr(0),
                          D, E, HIGH, GROUP, FACTORS, STAGES)),
        (_gradient_rows, (place, batch, heads, length, padded, x_ptr, x_stride_b, x_stride_t, x_stride_h, factor_ptr,
                          state_share_ptr, out_ptr, z_buffers, z_ready.index(0), buffers, ready, empty, gl.constexpr(1),
                          D, E, HIGH, GROUP, FACTORS, STAGES)),
        (_copy_for_gradient, (low_desc, high_desc, normalizer_desc, x_desc, batch, place, state, buffers, ready, empty,
                              HALF_DIM, HIGH, GROUP, STAGES)),
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
    count, chunk = states.low.shape[2], states.chunk
    # No keys come before boundary 0, and no queries after the last one.
    first_state = 1 if keys and states.first == 0 else 0
    first_chunk = states.first + first_state - (1 if keys else 0)
    chunks = min(count - first_state, ceil_div(x.shape[1], chunk) - first_chunk)
    groups = ceil_div(x.shape[2] // states.low.shape[1] * chunk // TILE, TILES)
    return _Reads(chunk, chunks, first_chunk, count, first_state, groups)


def query_states(x: Tensor, states: ChunkStates, *, keys: bool = False) -> Tensor:
    """φ(x) S: (b, h, t, e) float32, undefined for the rows of chunks that no state belongs to.

    Args:
        x: queries (b, t, h, d), which read the state at the start of their chunk, or
        keys: keys, which read that at its end.
    """
    batch, length, heads, dim = x.shape
    kv_heads, value_dim = states.low.shape[1], states.low.shape[4]
    out = x.new_empty(batch, heads, length, value_dim, dtype=torch.float32)
    x = aligned(x)
    reads = _reads(x, states, keys=keys)
    tile = [1, 1, value_dim, dim // 2]
    launch(
        query_states_kernel, flat_grid(reads.groups, reads.chunks, batch * kv_heads),
        head_major(x, TILE, dim // 2), blocks_of(states.low.flatten(0, 2), tile),
        blocks_of(states.high.flatten(0, 2), tile), x, x.stride(0), x.stride(1), x.stride(2), out, length, heads,
        *reads,
        GROUP=heads // kv_heads, D=dim, E=value_dim, HIGH=states.high.shape[3],
        HIGH_COLUMN=states.high.shape[-1] - dim // 2, STAGES=RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def gradient_states(
    x: Tensor, z: Tensor, states: ChunkStates, factor: Tensor | None = None, state_share: Tensor | None = None, *,
    keys: bool = False,
) -> Tensor:  # fmt: skip
    """Σ_i x_i (z S_i) + f x Z: (b, h, t, d) float32, undefined for the rows of chunks that no state belongs to.

    Args:
        x, keys: as in `query_states`.
        z: output gradients (b, t, h, e), or values.
        states: with all columns a.
        factor: f for each row (b, h, ≥ t) float32; None: 1.
        state_share: φ(x) Z (b, h, t) float32, with `factor`: rows where it is 0 do not see the state, and get 0.
    """
    batch, length, heads, dim = x.shape
    kv_heads, value_dim = states.low.shape[1], states.low.shape[4]
    assert states.high.shape[-1] == dim
    out = x.new_empty(batch, heads, length, dim, dtype=torch.float32)
    x, z = aligned(x), aligned(z)
    reads = _reads(x, states, keys=keys)
    tile = [1, 1, value_dim // 2, dim]
    normalizer = states.normalizer.flatten(0, 2)[None]
    launch(
        gradient_states_kernel, flat_grid(reads.groups, reads.chunks, batch * kv_heads),
        head_major(z, TILE, value_dim // 2), blocks_of(states.low.flatten(0, 2), tile),
        blocks_of(states.high.flatten(0, 2), tile), blocks_of(normalizer, [1, 1, dim // 2, dim]),
        head_major(x, TILE), x, x.stride(0), x.stride(1), x.stride(2), factor, state_share, out,
        length, 0 if factor is None else factor.shape[-1], heads, *reads,
        GROUP=heads // kv_heads, D=dim, E=value_dim, HIGH=states.high.shape[3], FACTORS=factor is not None,
        STAGES=RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return out
