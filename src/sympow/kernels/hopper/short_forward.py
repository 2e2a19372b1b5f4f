"""Forward pass of the attention form on Hopper, for short sequences of heads of 64.

It is faster there than the warp-specialized kernel (`forward`): several CTAs fit on a multiprocessor, and no operand is
prepared in a launch of its own.

y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij,   B_ij = exp(G_i − G_j) (q_i · k_j)^p.

As in `sympow.kernels.attention.forward`, a CTA owns 128 queries that start at row r, visits tiles of 64 keys, and
multiplies their weights by exp(G_r − G_j), one factor per column. Differences:

- The rows are processed as an upper and a lower half: while the weights of one half are computed, the matrix products
  of the other half run. Without this the two CTAs of a multiprocessor synchronize by chance and wait for the tensor
  cores at the same time.
- There is no float64 arithmetic, which would use the tensor cores' pipe (`running_sums.SplitSums`).
- With weak gates the diagonal is treated as any other tile, plus a mask: exp(G_r − G_j) exceeds 1 there, but not by
  much, and the rows' factor exp(G_i − G_r) cancels in y. Strong gates take one exponential per element, and so does
  float16, whose range it could leave.
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

from sympow.kernels.common import even_power, partial_row_sums, power_of_two_scale, round_to, split_program_id
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
    gluon_head_major,
    lift_weights,
    matrix,
    new_barriers,
    pairwise_decay,
    prefetch,
    thread_barrier,
)
from sympow.kernels.launch import ceil_div, empty_aligned, flat_grid, launch
from sympow.kernels.running_sums import Gates

QUERY_TILE, KEY_TILE, RING = 128, 64, 4
# Gates are weak if the product of those of a tile of queries exceeds 2^WEAK.
WEAK = gl.constexpr(-16)


@gluon.jit
def order_before_wait(sums):
    """The same sums, computed before the wait for matrix products that follows in the program.

    ptxas would move that wait up, before the arithmetic of the weights, and nothing would overlap. It does not move the
    wait across a store that depends on the sums. They are never negative, so nothing is ever stored. (A trap instead of
    the store is a branch, for which ptxas serializes every product of the kernel: C7518.)
    """
    return gl.inline_asm_elementwise(
        """{ .reg .pred negative; .reg .f32 total; .reg .u32 nowhere;
        add.f32 total, $2, $3; setp.lt.f32 negative, total, 0f00000000; mov.u32 nowhere, 0;
        @negative st.volatile.shared.f32 [nowhere], total;
        mov.b32 $0, $2; mov.b32 $1, $3; }""",
        "=r,=r,r,r", [sums], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def load_pair(k_desc, v_desc, batch, head, pair, skipped, pairs, k_buffers, v_buffers, barriers, STAGES: gl.constexpr):
    """Starts the copy of the keys of step `pair` + 1 and the values of step `pair`, which are needed at the same
    time."""
    COLUMNS: gl.constexpr = v_desc.block_type.shape[2]
    stage = pair % STAGES
    wanted = pair < pairs
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=wanted)
    async_load(k_desc, [batch, head, (pair + 1 - skipped) * COLUMNS, 0], barrier, k_buffers.index(stage), pred=wanted)
    async_load(v_desc, [batch, head, (pair - skipped) * COLUMNS, 0], barrier, v_buffers.index(stage), pred=wanted)


@gluon.jit
def scaled_queries(q_buffer, LEFT: gl.constexpr):
    """Half a tile of queries, each times its `power_of_two_scale`."""
    q = q_buffer.load(LEFT)
    return (q.to(gl.float32) * gl.expand_dims(power_of_two_scale(q), 1)).to(q.dtype)


@gluon.jit
def scaled_float16_queries(q_buffer, bound, LEFT: gl.constexpr, POWER: gl.constexpr):
    """The same, times another power of two for the range of float16 (`float16_range`); and log2 |q| without it."""
    q = q_buffer.load(LEFT)
    scaled = q.to(gl.float32) * gl.expand_dims(power_of_two_scale(q), 1)
    length = log_length(scaled, IN_RANGE=True)
    exponent = row_exponent(length, bound, WEIGHT_LIMIT, POWER)
    return (scaled * gl.expand_dims(power_of_two(exponent), 1)).to(q.dtype), length


@gluon.jit
def on_diagonal(
    scores, rows, columns, row_whole, row_rest, column_whole, column_rest, weak, acc, denominator, rounding, lift,
    POWER: gl.constexpr, GATED: gl.constexpr, dtype: gl.constexpr, SUMS_BY_ROW: gl.constexpr,
):  # fmt: skip
    """Weights of a tile on the diagonal, rounded as in the portable forward kernel, and their rows' sums, which are
    added to `denominator`; in float16 the sums of what rounding removed are added to `rounding`.

    In float16, `row_whole` includes the logarithm of a scale of the row, also without gates. If p > 2, weights and
    sums are multiplied by 2^lift (`lift_weights`); returned are the weights, acc, weight, rounding and lift.
    """
    scores = even_power(scores, POWER)
    causal = gl.expand_dims(rows, 1) >= gl.expand_dims(columns, 0)
    if not GATED:
        if dtype == gl.float16:
            scores *= gl.expand_dims(power_of_two(row_whole), 1)
        scores = gl.where(causal, scores, 0.0)
    elif weak:
        if dtype == gl.float16:
            # Before the decays of columns, which are above 1 here: the row's scale bounds its scores.
            scores *= gl.expand_dims(gl.exp2(row_whole + row_rest), 1)
        decay = gl.exp2(-(column_whole + column_rest))
        scores = gl.where(causal, scores * gl.expand_dims(decay, 0), 0.0)
    else:
        scores *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
    if dtype == gl.float16 and POWER > 2:
        scores, acc, denominator, rounding, lift = lift_weights(scores, acc, denominator, rounding, lift, SUMS_BY_ROW)
    rounded = round_to(scores, dtype)
    denominator += gl.sum(rounded, axis=1)
    if dtype == gl.float16:
        # As in the portable kernel: the weights that are returned are exact in float16.
        rounding += gl.sum(scores - rounded, axis=1)
    return rounded, acc, denominator, rounding, lift


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, y_desc, denominator_ptr, whole_ptr, rest_ptr, to_end_ptr, bound_ptr, length, padded_length,
    heads, GROUP: gl.constexpr, POWER: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y_i for a tile of queries, and Σ_j B_ij."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2] // 2
    D: gl.constexpr = q_desc.block_type.shape[3]
    COLUMNS: gl.constexpr = v_desc.block_type.shape[2]
    E: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = v_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    LEFT_Q: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    LEFT_P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUMS_BY_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    FLOAT16: gl.constexpr = dtype == gl.float16
    gl.static_assert(ROWS == COLUMNS)

    tiles = gl.cdiv(length, 2 * ROWS)
    order, sequence = split_program_id(tiles, gl.int32)
    tile = tiles - 1 - order  # tiles with the most keys start first
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * 2 * ROWS

    q_buffer = gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout)
    first_k_buffer = gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_barrier, count=1)
    barriers = new_barriers(STAGES, 1)
    fence_async_shared()

    # Steps: the tiles before `first` (an empty one if there is none), then the two of the diagonal.
    skipped = (first == 0).to(gl.int32)
    steps_before = first // COLUMNS + skipped
    pairs = steps_before + 2
    mbarrier.expect(q_barrier, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
    async_load(q_desc, [batch, head, first, 0], q_barrier, q_buffer)
    async_load(k_desc, [batch, kv_head, 0, 0], q_barrier, first_k_buffer)
    for pair in gl.static_range(STAGES - 1):
        load_pair(k_desc, v_desc, batch, kv_head, pair, skipped, pairs, k_buffers, v_buffers, barriers, STAGES)

    offsets = gl.arange(0, COLUMNS, BY_COLUMN)
    spread = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [4], [0]))
    if GATED:
        whole_ptr += kv_sequence.to(gl.int64) * padded_length
        rest_ptr += kv_sequence.to(gl.int64) * padded_length
        to_end_ptr += kv_sequence.to(gl.int64) * padded_length
        reference_whole = gl.load(whole_ptr + first)
        reference_rest = gl.load(rest_ptr + first)
        log_decay = (reference_whole - gl.load(whole_ptr + COLUMNS - 1)).to(gl.float32)
        log_decay += reference_rest - gl.load(rest_ptr + COLUMNS - 1)
        decay = gl.load(to_end_ptr + offsets) * gl.where(skipped == 0, gl.exp2(log_decay), 0.0)

    mbarrier.wait(q_barrier, 0)
    q_upper = q_buffer.reshape([2 * ROWS, D]).slice(0, ROWS)
    q_lower = q_buffer.reshape([2 * ROWS, D]).slice(ROWS, ROWS)
    if FLOAT16:
        bound_ptr += kv_sequence.to(gl.int64) * length
        bound = gl.load(bound_ptr + first)
        scaled, upper_length = scaled_float16_queries(q_upper, bound, LEFT_Q, POWER)
        q_upper.store(scaled)
        scaled, lower_length = scaled_float16_queries(q_lower, bound, LEFT_Q, POWER)
        q_lower.store(scaled)
    else:
        q_upper.store(scaled_queries(q_upper, LEFT_Q))
        q_lower.store(scaled_queries(q_lower, LEFT_Q))
    fence_async_shared()

    upper = gl.zeros((ROWS, E), gl.float32, SUMS)
    lower = gl.zeros((ROWS, E), gl.float32, SUMS)
    blank = gl.zeros((ROWS, COLUMNS), gl.float32, SCORES)
    k = first_k_buffer.reshape([COLUMNS, D]).permute((1, 0))
    upper_scores = warpgroup_mma(q_upper, k, blank, use_acc=False, is_async=True)
    lower_scores = warpgroup_mma(q_lower, k, blank, use_acc=False, is_async=True)
    upper_scores, lower_scores = warpgroup_mma_wait(0, deps=(upper_scores, lower_scores))
    if not GATED:
        upper_scores *= gl.where(skipped == 0, 1.0, 0.0)
        lower_scores *= gl.where(skipped == 0, 1.0, 0.0)
    weights = even_power(upper_scores, POWER)
    if GATED:
        weights *= gl.expand_dims(decay, 0)
    upper_sums = partial_row_sums(weights, ROWS, COLUMNS)
    lower_sums = partial_row_sums(blank, ROWS, COLUMNS)
    mbarrier.wait(barriers.index(0), 0)

    # While the weights of one half of the rows are computed, products of the other half run. No product stays in flight
    # from one step to the next: ptxas would serialize all products.
    for step in range(1, steps_before):
        stage = (step - 1) % STAGES
        k = matrix(k_buffers, stage).permute((1, 0))
        v = matrix(v_buffers, stage)
        if GATED:
            prefetch(to_end_ptr + (step + 1 - skipped) * COLUMNS + spread)
            next_decay = gl.load(to_end_ptr + (step - skipped) * COLUMNS + offsets)
            end_whole = gl.load(whole_ptr + (step + 1 - skipped) * COLUMNS - 1)
            end_rest = gl.load(rest_ptr + (step + 1 - skipped) * COLUMNS - 1)
        upper = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), v, upper, is_async=True)
        upper_scores = warpgroup_mma(q_upper, k, blank, use_acc=False, is_async=True)
        weights = even_power(lower_scores, POWER)
        if GATED:
            weights *= gl.expand_dims(decay, 0)
        lower_sums += partial_row_sums(weights, ROWS, COLUMNS)
        lower = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), v, lower, is_async=True)
        lower_scores = warpgroup_mma(q_lower, k, blank, use_acc=False, is_async=True)
        # No warp reads the previous pair any more: its buffer is free.
        thread_barrier()
        load_pair(
            k_desc, v_desc, batch, kv_head, step + STAGES - 2, skipped, pairs, k_buffers, v_buffers, barriers, STAGES
        )
        upper, upper_scores = warpgroup_mma_wait(2, deps=(upper, upper_scores))
        weights = even_power(upper_scores, POWER)
        if GATED:
            log_decay = (reference_whole - end_whole).to(gl.float32) + (reference_rest - end_rest)
            decay = next_decay * gl.exp2(log_decay)
            weights *= gl.expand_dims(decay, 0)
        upper_sums = order_before_wait(upper_sums + partial_row_sums(weights, ROWS, COLUMNS))
        mbarrier.wait(barriers.index(step % STAGES), (step // STAGES) & 1)
        lower, lower_scores, weights = warpgroup_mma_wait(0, deps=(lower, lower_scores, weights))

    stage = (steps_before - 1) % STAGES
    k = matrix(k_buffers, stage).permute((1, 0))
    v = matrix(v_buffers, stage)
    upper = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), v, upper, is_async=True)
    upper_scores = warpgroup_mma(q_upper, k, blank, use_acc=False, is_async=True)
    weights = even_power(lower_scores, POWER)
    if GATED:
        weights *= gl.expand_dims(decay, 0)
    lower_sums += partial_row_sums(weights, ROWS, COLUMNS)
    lower = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), v, lower, is_async=True)
    lower_scores = warpgroup_mma(q_lower, k, blank, use_acc=False, is_async=True)
    thread_barrier()
    load_pair(
        k_desc,
        v_desc,
        batch,
        kv_head,
        steps_before + STAGES - 2,
        skipped,
        pairs,
        k_buffers,
        v_buffers,
        barriers,
        STAGES,
    )
    upper, upper_scores, lower, lower_scores = warpgroup_mma_wait(0, deps=(upper, upper_scores, lower, lower_scores))

    upper_denominator = gl.convert_layout(gl.sum(upper_sums, axis=1), BY_ROW)
    lower_denominator = gl.convert_layout(gl.sum(lower_sums, axis=1), BY_ROW)
    upper_rows = first + gl.arange(0, ROWS, BY_ROW)
    lower_rows = upper_rows + ROWS
    columns = first + offsets
    weak = True
    # Placeholders, not read without gates.
    upper_whole, upper_rest, lower_whole, lower_rest = (
        upper_denominator,
        upper_denominator,
        upper_denominator,
        upper_denominator,
    )
    column_whole, column_rest, later_whole, later_rest = offsets, offsets, offsets, offsets
    if FLOAT16:
        upper_length = gl.convert_layout(upper_length, BY_ROW)
        lower_length = gl.convert_layout(lower_length, BY_ROW)
        upper_bound = gl.load(bound_ptr + gl.minimum(upper_rows, length - 1))
        lower_bound = gl.load(bound_ptr + gl.minimum(lower_rows, length - 1))
        upper_exponent, upper_change = exponents(upper_length, bound, upper_bound, WEIGHT_LIMIT, POWER)
        lower_exponent, lower_change = exponents(lower_length, bound, lower_bound, WEIGHT_LIMIT, POWER)
        upper_change *= POWER
        lower_change *= POWER
        if not GATED:
            upper_whole, lower_whole = upper_change, lower_change
            upper_decay, lower_decay = power_of_two(upper_change), power_of_two(lower_change)
    if GATED:
        upper_whole = (gl.load(whole_ptr + upper_rows) - reference_whole).to(gl.float32)
        lower_whole = (gl.load(whole_ptr + lower_rows) - reference_whole).to(gl.float32)
        upper_rest = gl.load(rest_ptr + upper_rows) - reference_rest
        lower_rest = gl.load(rest_ptr + lower_rows) - reference_rest
        column_whole = (gl.load(whole_ptr + columns) - reference_whole).to(gl.float32)
        later_whole = (gl.load(whole_ptr + columns + COLUMNS) - reference_whole).to(gl.float32)
        column_rest = gl.load(rest_ptr + columns) - reference_rest
        later_rest = gl.load(rest_ptr + columns + COLUMNS) - reference_rest
        if FLOAT16:
            upper_whole += upper_change
            lower_whole += lower_change
        upper_decay = gl.exp2(upper_whole + upper_rest)
        lower_decay = gl.exp2(lower_whole + lower_rest)
        weak = gl.load(whole_ptr + gl.minimum(first + 2 * ROWS, length) - 1) - reference_whole > WEAK
    if FLOAT16:
        upper *= gl.expand_dims(gl.convert_layout(upper_decay, SUMS_BY_ROW), 1)
        lower *= gl.expand_dims(gl.convert_layout(lower_decay, SUMS_BY_ROW), 1)
        upper_denominator *= upper_decay
        lower_denominator *= lower_decay
    elif GATED:
        if not weak:
            upper *= gl.expand_dims(gl.convert_layout(upper_decay, SUMS_BY_ROW), 1)
            lower *= gl.expand_dims(gl.convert_layout(lower_decay, SUMS_BY_ROW), 1)
            upper_denominator *= upper_decay
            lower_denominator *= lower_decay

    # No product is in flight across the branches on `weak` either.
    stage = steps_before % STAGES
    mbarrier.wait(barriers.index(stage), (steps_before // STAGES) & 1)
    v = matrix(v_buffers, stage)
    upper_past, lower_past = upper_denominator, lower_denominator
    none = gl.zeros((ROWS,), gl.float32, BY_ROW)
    weights, upper, upper_denominator, upper_rounding, upper_lift = on_diagonal(
        upper_scores, upper_rows, columns, upper_whole, upper_rest, column_whole, column_rest, weak, upper,
        upper_denominator, none, none, POWER, GATED, dtype, SUMS_BY_ROW,
    )  # fmt: skip
    upper = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), v, upper)
    weights, lower, lower_denominator, lower_rounding, lower_lift = on_diagonal(
        lower_scores, lower_rows, columns, lower_whole, lower_rest, column_whole, column_rest, weak, lower,
        lower_denominator, none, none, POWER, GATED, dtype, SUMS_BY_ROW,
    )  # fmt: skip
    lower = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), v, lower, is_async=True)
    k = matrix(k_buffers, stage).permute((1, 0))
    lower_scores = warpgroup_mma(q_lower, k, blank, use_acc=False, is_async=True)
    lower, lower_scores = warpgroup_mma_wait(0, deps=(lower, lower_scores))
    columns += COLUMNS
    weights, lower, lower_denominator, lower_rounding, lower_lift = on_diagonal(
        lower_scores, lower_rows, columns, lower_whole, lower_rest, later_whole, later_rest, weak, lower,
        lower_denominator, lower_rounding, lower_lift, POWER, GATED, dtype, SUMS_BY_ROW,
    )  # fmt: skip
    stage = (steps_before + 1) % STAGES
    mbarrier.wait(barriers.index(stage), ((steps_before + 1) // STAGES) & 1)
    lower = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_P), matrix(v_buffers, stage), lower)

    upper_lost, lower_lost = upper_denominator == 0, lower_denominator == 0
    upper_divisor = gl.where(upper_lost, 1.0, upper_denominator)
    lower_divisor = gl.where(lower_lost, 1.0, lower_denominator)
    if FLOAT16 and POWER > 2:
        upper_total = (upper_denominator + upper_rounding) * power_of_two(-upper_lift)
        lower_total = (lower_denominator + lower_rounding) * power_of_two(-lower_lift)
        upper_lost = upper_lost | is_lost(upper_past, upper_total)
        lower_lost = lower_lost | is_lost(lower_past, lower_total)
        upper_divisor = gl.where(upper_lost, float("inf"), upper_divisor)
        lower_divisor = gl.where(lower_lost, float("inf"), lower_divisor)
    y_buffer = q_buffer.reshape([2 * ROWS, E])
    divisor = gl.convert_layout(upper_divisor, SUMS_BY_ROW)
    y_buffer.slice(0, ROWS).store((upper / gl.expand_dims(divisor, 1)).to(dtype))
    divisor = gl.convert_layout(lower_divisor, SUMS_BY_ROW)
    y_buffer.slice(ROWS, ROWS).store((lower / gl.expand_dims(divisor, 1)).to(dtype))
    fence_async_shared()
    async_store(y_desc, [batch, head, first, 0], q_buffer)
    if FLOAT16:
        # 0 if the weights of a row were lost by rounding.
        upper_denominator = gl.where(upper_lost, 0.0, upper_denominator + upper_rounding) * power_of_two(-upper_lift)
        lower_denominator = gl.where(lower_lost, 0.0, lower_denominator + lower_rounding) * power_of_two(-lower_lift)
        upper_denominator *= power_of_two(-upper_change) * power_of_two(-upper_exponent * POWER)
        lower_denominator *= power_of_two(-lower_change) * power_of_two(-lower_exponent * POWER)
    elif GATED:
        upper_denominator = gl.where(weak, upper_denominator * upper_decay, upper_denominator)
        lower_denominator = gl.where(weak, lower_denominator * lower_decay, lower_denominator)
    denominator_ptr += sequence.to(gl.int64) * length
    gl.store(denominator_ptr + upper_rows, upper_denominator, mask=upper_rows < length)
    gl.store(denominator_ptr + lower_rows, lower_denominator, mask=lower_rows < length)
    tma.store_wait(0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    gates: Gates | None,
    *,
    key_range: KeyRange | None = None,
) -> tuple[Tensor, Tensor]:
    """y (b, t, h, e) and the rows' denominators Σ_j B_ij (b, h, t) float32, of a call that its row of
    `attention.engines` supports.

    Args:
        gates: from `gate_sums` with tiles of 64 tokens, or None.
        key_range: of k and v, for float16; else None.
    """
    assert gates is None or gates.tile == KEY_TILE
    split = None if gates is None else gates.split
    batch, length, heads, _ = q.shape
    y = empty_aligned(v, batch, length, heads, v.shape[-1])
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    # Without fused multiply-add every weight is computed before the sums that `order_before_wait` orders.
    launch(
        forward_kernel, flat_grid(ceil_div(length, QUERY_TILE), batch * heads),
        gluon_head_major(q, QUERY_TILE), gluon_head_major(k, KEY_TILE), gluon_head_major(v, KEY_TILE),
        gluon_head_major(y, QUERY_TILE), denominator, split and split.whole, split and split.rest,
        gates and gates.to_end, key_range and key_range.bound, length, gates.to_end.shape[-1] if gates else 0, heads,
        GROUP=heads // k.shape[2], POWER=power, GATED=gates is not None, STAGES=RING, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return y, denominator
