"""Forward pass of the attention form on Hopper, and of the chunked form once φ(q) S is known
(`states`), warp-specialized.

A CTA owns 128 queries and has three partitions of warps: one warp copies tiles of keys and values to shared memory, and
two warpgroups own 64 queries each. In a warpgroup, the scores of one tile are computed together with the product of the
previous tile's weights with its values, and the weights of this tile are computed during the latter. The warpgroups
wait for copies but not for each other, so while one computes weights the other's products run.

Inside a block of 128 keys decays are multiplied into the keys (`decayed`), so that a tile of scores takes one factor,
the decay from the end of the tile to the first query of the CTA. The last tile, on the diagonal, reads the keys as they
are and takes one exponential per element.
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

from sympow.kernels.common import even_power, partial_row_sums, power_of_two_scale, round_to
from sympow.kernels.float16_range import (
    WEIGHT_LIMIT,
    KeyRange,
    exponents,
    is_lost,
    log_length,
    power_of_two,
    row_exponent,
)
from sympow.kernels.hopper.common import (
    async_load,
    async_store,
    free_stage,
    gluon_head_major,
    lift_weights,
    load_rows,
    matrix,
    new_barriers,
    padded_width,
    pairwise_decay,
    sums_before_chunk,
    sums_since,
    thread_barrier,
)
from sympow.kernels.hopper.decayed import BLOCK, decayed
from sympow.kernels.launch import ceil_div, empty_aligned, flat_grid, launch
from sympow.kernels.running_sums import Gates

# Tokens per tile of keys and per warpgroup of queries, and tiles of keys, and of values, in shared memory.
KEY_TILE, QUERY_TILE, RING = 128, 64, 2
# Registers per thread of a warpgroup that owns queries and of the warp that copies, and of the kernel as it starts.
REGISTERS, COPY_REGISTERS, START_REGISTERS = gl.constexpr(240), gl.constexpr(24), 168


@gluon.jit
def _copy_tiles(
    k_desc, decayed_desc, v_desc, batch, head, begin, steps_before, buffers, ready, empty, STAGES: gl.constexpr
):
    """Copies the tiles of keys and values of all steps, from row `begin` on; the last one lies on the diagonal."""
    COLUMNS: gl.constexpr = k_desc.block_type.shape[2]
    k_buffers, v_buffers = buffers
    k_ready, v_ready = ready
    k_empty, v_empty = empty
    for step in range(steps_before + 1):
        stage = step % STAGES
        free = ((step // STAGES) & 1) ^ 1
        start = [batch, head, begin + step * COLUMNS, 0]
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        async_load(decayed_desc, start, k_ready.index(stage), k_buffers.index(stage), pred=step < steps_before)
        async_load(k_desc, start, k_ready.index(stage), k_buffers.index(stage), pred=step == steps_before)
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        async_load(v_desc, start, v_ready.index(stage), v_buffers.index(stage))


@gluon.jit
def _attend_rows(
    descriptors, pointers, place, q_buffers, q_ready, buffers, ready, empty,
    MEMBER: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, WITH_STATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y_i and Σ_j B_ij for the queries of one warpgroup."""
    q_desc, v_desc, y_desc = descriptors
    denominator_ptr, whole_ptr, rest_ptr, state_share_ptr, from_state_ptr, bound_ptr = pointers
    batch, head, sequence, first, begin, steps_before, length, chunk, first_boundary = place
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = v_desc.block_type.shape[2]
    E: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    LEFT_Q: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    LEFT_P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUMS_BY_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    k_buffers, v_buffers = buffers
    k_ready, v_ready = ready
    k_empty, v_empty = empty

    mbarrier.wait(q_ready, 0)
    q = matrix(q_buffers, MEMBER)
    own = q.load(LEFT_Q)
    scaled = own.to(gl.float32) * gl.expand_dims(power_of_two_scale(own), 1)
    if FLOAT16:
        # Once more, so that no weight leaves the range (`float16_range`).
        bound = gl.load(bound_ptr + first)
        q_length = log_length(scaled, IN_RANGE=True)
        scaled *= gl.expand_dims(power_of_two(row_exponent(q_length, bound, WEIGHT_LIMIT, POWER)), 1)
        q_length = gl.convert_layout(q_length, BY_ROW)
    q.store(scaled.to(dtype))
    fence_async_shared()
    thread_barrier()
    if GATED:
        reference_whole = gl.load(whole_ptr + first)
        reference_rest = gl.load(rest_ptr + first)
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    acc = gl.zeros((ROWS, E), gl.float32, SUMS)
    sums = partial_row_sums(blank, ROWS, COLUMNS)
    rows = first + MEMBER * ROWS + gl.arange(0, ROWS, BY_ROW)
    denominator = gl.zeros((ROWS,), gl.float32, BY_ROW)
    if WITH_STATE:
        boundary = begin // chunk
        if boundary >= first_boundary:
            denominator = gl.load(
                state_share_ptr + sequence.to(gl.int64) * length + rows, mask=rows < length, other=0.0
            )
            seen = gl.expand_dims(gl.convert_layout(denominator, SUMS_BY_ROW) != 0, 1)
            state_rows = first + MEMBER * ROWS + gl.arange(0, ROWS, SUMS_BY_ROW)
            acc = gl.where(seen, load_rows(from_state_ptr, sequence, state_rows, length, E, SUMS), 0.0)
            if GATED:
                whole, rest = sums_before_chunk(whole_ptr, rest_ptr, boundary, chunk)
                since_state = gl.exp2((reference_whole - whole).to(gl.float32) + (reference_rest - rest))
                acc *= since_state
                denominator *= since_state

    if steps_before > 0:
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(q, matrix(k_buffers, 0).permute((1, 0)), blank, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        free_stage(k_empty, 0)
        weights = even_power(scores, POWER)
        if GATED:
            log_decay = (reference_whole - gl.load(whole_ptr + begin + COLUMNS - 1)).to(gl.float32)
            log_decay += reference_rest - gl.load(rest_ptr + begin + COLUMNS - 1)
            weights *= gl.exp2(log_decay)
        sums += partial_row_sums(weights, ROWS, COLUMNS)
        # No product stays in flight from one step to the next: ptxas would serialize all products.
        for step in range(1, steps_before):
            stage = step % STAGES
            last = (step - 1) % STAGES
            left = gl.convert_layout(weights.to(dtype), LEFT_P)
            if GATED:
                end_whole = gl.load(whole_ptr + begin + (step + 1) * COLUMNS - 1)
                end_rest = gl.load(rest_ptr + begin + (step + 1) * COLUMNS - 1)
            mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
            scores = warpgroup_mma(q, matrix(k_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(last), ((step - 1) // STAGES) & 1)
            acc = warpgroup_mma(left, matrix(v_buffers, last), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            free_stage(k_empty, stage)
            weights = even_power(scores, POWER)
            if GATED:
                weights *= gl.exp2((reference_whole - end_whole).to(gl.float32) + (reference_rest - end_rest))
            sums += partial_row_sums(weights, ROWS, COLUMNS)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            free_stage(v_empty, last)
        last = (steps_before - 1) % STAGES
        mbarrier.wait(v_ready.index(last), ((steps_before - 1) // STAGES) & 1)
        acc = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), matrix(v_buffers, last), acc)
        free_stage(v_empty, last)

    denominator += gl.convert_layout(gl.sum(sums, axis=1), BY_ROW)
    columns = first + gl.arange(0, COLUMNS, BY_COLUMN)
    if FLOAT16:
        own_bound = gl.load(bound_ptr + gl.minimum(rows, length - 1))
        exponent, change = exponents(q_length, bound, own_bound, WEIGHT_LIMIT, POWER)
        change *= POWER
        if not GATED:
            acc *= gl.expand_dims(gl.convert_layout(power_of_two(change), SUMS_BY_ROW), 1)
            denominator *= power_of_two(change)
    if GATED:
        row_whole = (gl.load(whole_ptr + rows) - reference_whole).to(gl.float32)
        if FLOAT16:
            row_whole += change
        row_rest = gl.load(rest_ptr + rows) - reference_rest
        row_decay = gl.exp2(row_whole + row_rest)
        acc *= gl.expand_dims(gl.convert_layout(row_decay, SUMS_BY_ROW), 1)
        denominator *= row_decay
    stage = steps_before % STAGES
    mbarrier.wait(k_ready.index(stage), (steps_before // STAGES) & 1)
    scores = warpgroup_mma(q, matrix(k_buffers, stage).permute((1, 0)), blank, use_acc=False, is_async=True)
    causal = gl.expand_dims(rows, 1) >= gl.expand_dims(columns, 0)
    scores = even_power(warpgroup_mma_wait(0, deps=(scores,)), POWER)
    if GATED:
        column_whole, column_rest = sums_since(whole_ptr, rest_ptr, columns, reference_whole, reference_rest)
        scores *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
    else:
        if FLOAT16:
            scores *= gl.expand_dims(power_of_two(change), 1)
        scores = gl.where(causal, scores, 0.0)
    earlier = denominator
    lift = gl.zeros((ROWS,), gl.float32, BY_ROW)
    if FLOAT16 and POWER > 2:
        scores, acc, denominator, _, lift = lift_weights(scores, acc, denominator, lift, lift, SUMS_BY_ROW)
    # Summed as rounded for the product, as in the portable forward kernel. The weights that float16 returns are exact.
    exact = scores
    scores = round_to(scores, dtype)
    denominator += gl.sum(scores, axis=1)
    if FLOAT16:
        rounding = gl.sum(exact - scores, axis=1)
    mbarrier.wait(v_ready.index(stage), (steps_before // STAGES) & 1)
    acc = warpgroup_mma(gl.convert_layout(scores.to(dtype), LEFT_P), matrix(v_buffers, stage), acc)

    lost = denominator == 0
    divisor = gl.where(lost, 1.0, denominator)
    if FLOAT16 and POWER > 2:
        lost = lost | is_lost(earlier, (denominator + rounding) * power_of_two(-lift))
        divisor = gl.where(lost, float("inf"), divisor)
    divisor = gl.convert_layout(divisor, SUMS_BY_ROW)
    y_buffer = q_buffers.index(MEMBER)
    y_buffer.reshape([ROWS, E]).store((acc / gl.expand_dims(divisor, 1)).to(dtype))
    fence_async_shared()
    thread_barrier()
    async_store(y_desc, [batch, head, first + MEMBER * ROWS, 0], y_buffer)
    if FLOAT16:
        # As in the portable forward kernel: 0 if the weights of the row were lost by rounding.
        denominator = gl.where(lost, 0.0, denominator + rounding) * power_of_two(-lift)
        denominator *= power_of_two(-change) * power_of_two(-exponent * POWER)
    gl.store(denominator_ptr + sequence.to(gl.int64) * length + rows, denominator, mask=rows < length)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, decayed_desc, v_desc, y_desc, denominator_ptr, whole_ptr, rest_ptr, state_share_ptr, from_state_ptr,
    bound_ptr, length, padded_length, heads, tiles, chunk, first_boundary,
    GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, WITH_STATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y_i for 128 queries, and Σ_j B_ij."""
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
    kv_sequence = (batch * (heads // GROUP) + kv_head).to(gl.int64)
    if dtype == gl.float16:
        bound_ptr += kv_sequence * length
    if GATED:
        whole_ptr += kv_sequence * padded_length
        rest_ptr += kv_sequence * padded_length

    q_buffers = gl.allocate_shared_memory(dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_ready = new_barriers(1, 1)
    ready = (new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    empty = (new_barriers(STAGES, 2), new_barriers(STAGES, 2))
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(q_ready.index(0), 2 * q_desc.block_type.nbytes)
    for member in gl.static_range(2):
        async_load(q_desc, [batch, head, first + member * ROWS, 0], q_ready.index(0), q_buffers.index(member))

    descriptors = (q_desc, v_desc, y_desc)
    pointers = (denominator_ptr, whole_ptr, rest_ptr, state_share_ptr, from_state_ptr, bound_ptr)
    place = (batch, head, sequence, first, begin, steps_before, length, chunk, first_boundary)
    buffers = (k_buffers, v_buffers)
    gl.warp_specialize([
        (_attend_rows, (descriptors, pointers, place, q_buffers, q_ready.index(0), buffers, ready, empty,
                        gl.constexpr(0), POWER, GATED, WITH_STATE, STAGES)),
        (_attend_rows, (descriptors, pointers, place, q_buffers, q_ready.index(0), buffers, ready, empty,
                        gl.constexpr(1), POWER, GATED, WITH_STATE, STAGES)),
        (_copy_tiles, (k_desc, decayed_desc, v_desc, batch, kv_head, begin, steps_before, buffers, ready, empty,
                       STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, power: int, gates: Gates | None, *,
    chunk: int = 0, first_boundary: int = 0, state_share: Tensor | None = None, from_state: Tensor | None = None,
    key_range: KeyRange | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y (b, t, h, e) and the rows' denominators Σ_j B_ij (b, h, t) float32, of a call that its row of
    `attention.engines` supports.

    Args:
        gates: from `gate_sums`, or None.
        chunk: tokens per chunk, a multiple of 128; 0: all in one.
        first_boundary: with states, the first chunk that sees one.
        state_share, from_state: φ(q) Z (b, h, t), 0 in rows that do not see the state, and φ(q) S (b, h, t, e),
            float32, without decay since the start of the chunk; None: there are no states.
        key_range: of k and v, for float16, without states; else None.
    """
    split = None if gates is None else gates.split
    batch, length, heads, _ = q.shape
    y = empty_aligned(v, batch, length, heads, v.shape[-1])
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    tiles = ceil_div(length, BLOCK)
    width = padded_width(q, v)
    launch(
        forward_kernel, flat_grid(tiles, batch * heads),
        gluon_head_major(q, QUERY_TILE, width), gluon_head_major(k, KEY_TILE, width),
        gluon_head_major(decayed(k, split, power, to_end=True), KEY_TILE, width), gluon_head_major(v, KEY_TILE, width),
        gluon_head_major(y, QUERY_TILE, width), denominator, split and split.whole, split and split.rest, state_share,
        from_state, key_range and key_range.bound,
        length, split.whole.shape[-1] if split else 0, heads, tiles, chunk or tiles * BLOCK, first_boundary,
        GROUP=heads // k.shape[2], POWER=power, GATED=gates is not None, WITH_STATE=from_state is not None, STAGES=RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return y, denominator
