"""States at the ends of chunks, p = 2, and the sums over later queries that their gradients need.

After a chunk that ends at R, with every key decayed to R,
    S_ia = Σ_{j≤R} exp(G_R − G_j) k_i k_a v_j      Z_ia = Σ_{j≤R} exp(G_R − G_j) k_i k_a,
computed in three steps:
1. `decay_and_transpose_kernel` writes the keys times exp(G_R − G_j), transposed, and computes Z of each chunk alone;
2. `update_kernel` computes S of each chunk alone: for each entry i of the key a product (v * k_i)ᵀ k, its left operand
   computed in registers;
3. `scan_kernel` adds up the chunks, decaying the state carried between them.
The gradient of S is the same sum with queries for keys, output gradients for values, and time reversed:
    D_ia = Σ_{t>R} exp(G_t − G_R) q_i q_a dy_t.
An initial state starts the scan at boundary 0, and the final state is its end; in reverse, the gradient of the final
state starts it and that of the initial state is its end. Where the start arrives late, from another GPU, `chunk_sums`
takes the first two steps without it, `end_alone` computes the end of a scan from zero, and `scan_sums` takes the third
step later.

S is symmetric in (i, a). The entries i ≥ d/2 are stored apart (`second_half`). Their a < d/2 are not computed; if
gradients need all features, `mirror_kernel` copies them. `sympow.kernels.states.reference.chunk_states_reference` is
the plain PyTorch reference.

The kernels for p = 4 (`quartic`) take the same two steps, update and scan, but share no code with these: an update
there multiplies pairs of entries instead of entries, and its scan applies multinomial coefficients and has no start or
end. In a common kernel every term would be conditional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import divide_steps, dot_precision, split_program_id, wait_for_mma
from sympow.kernels.device_limits import limits_of, register_limit
from sympow.kernels.float16_range import GRADIENT_FACTOR, KEY_LENGTH, VALUE_FACTOR, StateScales
from sympow.kernels.launch import aligned, blocks_of, ceil_div, flat_grid, head_major, launch
from sympow.kernels.running_sums import Gates
from sympow.kernels.states.full_state import FullState

# Tokens per tile. Transposed copies are stored tile by tile, because each tile is read and written as a whole.
TILE_TOKENS = 64
# Registers per thread of `decay_and_transpose_kernel`. With at most 80, six CTAs fit on a multiprocessor, and all CTAs
# of a call on 65,536 tokens run at once.
TRANSPOSE_REGISTERS = 80
# Numbers of a state that a CTA mirrors.
MIRROR_SIZE = 8192
# The kernels compute S_i of up to this many entries i together.
ENTRY_MULTIPLE = 8

# The three tensors of a state: Z, and S for the lower and for the upper half of the entries.
StateTensors = tuple[Any, Any, Any]
NO_TENSORS: StateTensors = (None, None, None)


@dataclass(frozen=True)
class ChunkStates:
    """n states at chunk boundaries; boundary b lies after b chunks.

    Attributes:
        first_half: S_i for i < d/2, (b, h_kv, n, d/2, e, d), in the dtype of the inputs.
        second_half: S_i for i ≥ d/2, (b, h_kv, n, d/2, e, d), or (…, d/2) for a ≥ d/2 only. Where keys are padded,
            their last entries are zero, and those S_i are left out: fewer than d/2 remain.
        normalizer: Z, (b, h_kv, n, d, d).
        chunk: tokens between two boundaries.
        first: the boundary of the first state: 0 if there is an initial state, else 1.
    """

    first_half: Tensor
    second_half: Tensor
    normalizer: Tensor
    chunk: int
    first: int = 1

    @property
    def count(self) -> int:
        """n."""
        return self.first_half.shape[2]


@dataclass(frozen=True)
class ChunkSums:
    """The sums of each chunk alone: `ChunkStates` before the scan.

    Attributes:
        first_half, second_half: as in `ChunkStates`; float32 if `precise`.
        normalizer: (b, h_kv, n, d, d) float32.
        dtype: of the states.
        gate_sums: G, (b, h_kv, t) float64; None without gates.
        length: t.
        chunk: tokens between two boundaries.
        first: the boundary of the first state.
        started: whether the scan starts from a given state, so that its first boundary has no chunk of its own.
        reverse: whether a chunk counts at the boundary before it, and the scan runs backwards from the last
            boundary.
        scales: of float16 states, which `first_half`, `second_half` and the scanned states have; else None.
    """

    first_half: Tensor
    second_half: Tensor
    normalizer: Tensor
    dtype: torch.dtype
    gate_sums: Tensor | None
    length: int
    chunk: int
    first: int
    started: bool
    reverse: bool
    scales: StateScales | None = None

    @property
    def tensors(self) -> StateTensors:
        return self.normalizer, self.first_half, self.second_half


class QueryTerms(NamedTuple):
    """What a sum over queries and output gradients reads of them besides.

    Attributes:
        minus_delta: −δ, the weight of each query in Z, (b, h, ≥ t) float32.
        state_share: φ(q) Z of each query's state (`forward.attend`), (b, h, t): queries with 0 do not count.
        factor: of each query, as long as `minus_delta`; for float16, else None.
    """

    minus_delta: Tensor
    state_share: Tensor
    factor: Tensor | None = None


@triton.jit
def sum_at(gate_sums_ptr, boundary, chunk, length):
    """G at the last token before a boundary, 0 if there is none."""
    position = tl.minimum(boundary * chunk, length) - 1
    return tl.load(gate_sums_ptr + position, mask=position >= 0, other=0.0)


@triton.jit
def _token_weights(
    gate_sums_ptr, minus_delta_ptr, factor_ptr, state_share_ptr, amount, delta_scale, reference, step, tiles,
    sequence, chunk_start, length, padded,
    GROUP: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr, TOKENS: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """The weights in S and in Z of the tokens of a step's tile, (TOKENS,) each; `sequence` is that of the first of
    GROUP heads."""
    member, tile = divide_steps(step, tiles, GROUP)
    sequence += member
    tokens = chunk_start + tile * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < length
    decay = tl.full((TOKENS,), 1.0, tl.float32)
    if GATED:
        sums = tl.load(gate_sums_ptr + tokens, mask=inside, other=0.0)
        log_decay = sums - reference if REVERSE else reference - sums
        decay = tl.exp(tl.minimum(log_decay.to(tl.float32), 0.0))
    if FLOAT16:
        decay *= amount
    if REVERSE:
        if GROUP > 1:
            # Past the last step there is no head to read from. Compared as a block: Triton 3.9's interpreter refuses
            # masks made of one number's condition.
            inside &= tl.broadcast_to(member, (TOKENS,)) < GROUP
        state_share = tl.load(state_share_ptr + sequence * length + tokens, mask=inside, other=0.0)
        decay = tl.where(state_share == 0, 0.0, decay)
        if FLOAT16:
            decay *= tl.load(factor_ptr + sequence * padded + tokens, mask=inside, other=0.0)
        minus_delta = tl.load(minus_delta_ptr + sequence * padded + tokens, mask=inside, other=0.0)
        if FLOAT16:
            minus_delta *= delta_scale
        return decay, decay * minus_delta
    else:
        return decay, decay


@triton.jit
def decay_and_transpose_kernel(
    x_desc, gate_sums_ptr, minus_delta_ptr, factor_ptr, state_share_ptr, scales_ptr, decayed_transposed_ptr,
    normalizer_ptr, length, all_tiles, padded, kv_heads, chunk_count,
    state_count, first_chunk, first_state, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, FLOAT16: tl.constexpr = False, SCALES: tl.constexpr = 0, TOKEN_SCALE: tl.constexpr = 0,
):  # fmt: skip
    """Decayed, transposed tokens of a chunk, and Z of the chunk alone.

    REVERSE: tokens are queries, decayed to the end of the previous chunk; those that did not see their state count as
    zero, and Z has the further weight −δ per token. FLOAT16: transposed tokens have a scale (`float16_range`), and in
    reverse a factor per token.
    """
    step_chunk, kv_sequence = split_program_id(chunk_count, tl.int32)
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    index, state_index = step_chunk + first_chunk, step_chunk + first_state
    chunk_start = index * chunk
    tiles = chunk // TOKENS
    reference = 0.0
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        reference = sum_at(gate_sums_ptr, index if REVERSE else index + 1, chunk, length)
    dims = tl.arange(0, D)
    normalizer = tl.zeros((D, D), tl.float32)
    first_sequence = (kv_sequence * GROUP).to(tl.int64)
    amount = 1.0
    delta_scale = 1.0
    if FLOAT16:
        scales_ptr += kv_sequence * SCALES
        token_scale = tl.load(scales_ptr + TOKEN_SCALE)
        amount = token_scale
        if REVERSE:
            amount *= tl.load(scales_ptr + GRADIENT_FACTOR)
            delta_scale = 1.0 / tl.load(scales_ptr + KEY_LENGTH)
    decay, weight = _token_weights(
        gate_sums_ptr, minus_delta_ptr, factor_ptr, state_share_ptr, amount, delta_scale, reference, 0, tiles,
        first_sequence, chunk_start, length, padded, GROUP, GATED, REVERSE, TOKENS, FLOAT16,
    )  # fmt: skip
    for step in tl.range(0, GROUP * tiles):
        member, tile = divide_steps(step, tiles, GROUP)
        start = chunk_start + tile * TOKENS
        # Loaded a step ahead by hand: the compiler only pipelines the operands of products.
        next_decay, next_weight = _token_weights(
            gate_sums_ptr, minus_delta_ptr, factor_ptr, state_share_ptr, amount, delta_scale, reference, step + 1,
            tiles, first_sequence, chunk_start, length, padded, GROUP, GATED, REVERSE, TOKENS, FLOAT16,
        )  # fmt: skip
        x = x_desc.load([batch, kv_head * GROUP + member, start, 0]).reshape(TOKENS, D)
        decayed = (x * decay[:, None]).to(x.dtype)
        weighted = (x * weight[:, None]).to(x.dtype) if REVERSE else decayed
        target = ((first_sequence + member) * all_tiles + index * tiles + tile) * (D * TOKENS)
        tl.store(decayed_transposed_ptr + target + dims[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :], decayed.T)
        normalizer = wait_for_mma(tl.dot(weighted.T, x, normalizer, input_precision=PRECISION))
        decay, weight = next_decay, next_weight
    if FLOAT16:
        normalizer /= token_scale * delta_scale
    out = normalizer_ptr + (kv_sequence * state_count + state_index).to(tl.int64) * D * D
    tl.store(out + dims[:, None] * D + dims[None, :], normalizer)


@triton.jit
def update_kernel(
    x_desc, y_desc, decayed_transposed_desc, out_desc, scales_ptr, all_tiles, kv_heads, chunk_count, state_count,
    first_chunk, first_state, chunk, first_entry, first_column, out_column, groups,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    FLOAT16: tl.constexpr = False, SCALES: tl.constexpr = 0, TOKEN_SCALE: tl.constexpr = 0, KV_SCALE: tl.constexpr = 0,
):  # fmt: skip
    """S_iᵀ = Σ (y * x_i)ᵀ x over the tokens of a chunk for ENTRIES entries i: (e, COLUMNS) each."""
    group, rest = split_program_id(groups, tl.int32)
    step_chunk, kv_sequence = rest % chunk_count, rest // chunk_count
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    entry = first_entry + group * ENTRIES
    chunk_start = (step_chunk + first_chunk) * chunk
    tiles = chunk // TOKENS
    accs = (tl.zeros((E, COLUMNS), tl.float32),) * ENTRIES
    for step in tl.range(0, GROUP * tiles, num_stages=STAGES):
        member, tile = divide_steps(step, tiles, GROUP)
        head = kv_head * GROUP + member
        start = chunk_start + tile * TOKENS
        row = ((batch * kv_heads * GROUP + head) * all_tiles + start // TOKENS) * D + entry
        y = y_desc.load([batch, head, start, 0]).reshape(TOKENS, E).T
        x = x_desc.load([batch, head, start, first_column]).reshape(TOKENS, COLUMNS)
        sums = ()
        for n in tl.static_range(ENTRIES):
            x_entry = decayed_transposed_desc.load([row + n, 0]).reshape(TOKENS)
            product = tl.dot(y * x_entry[None, :], x, accs[n], input_precision=PRECISION)
            # Waiting for the last product waits for all.
            sums = sums + (wait_for_mma(product) if n == ENTRIES - 1 else product,)
        accs = sums
    rescale = 1.0
    if FLOAT16:
        scales_ptr += kv_sequence * SCALES
        rescale = tl.load(scales_ptr + KV_SCALE) / tl.load(scales_ptr + TOKEN_SCALE)
    for n in tl.static_range(ENTRIES):
        total = accs[n] * rescale if FLOAT16 else accs[n]
        out = total.to(out_desc.dtype).reshape(1, 1, E, COLUMNS)
        state = kv_sequence * state_count + step_chunk + first_state
        out_desc.store([state, group * ENTRIES + n, 0, out_column], out)


@triton.jit
def mirror_kernel(
    first_half_ptr, second_half_ptr, chunk_count, state_count, first_state,
    HALF_DIM: tl.constexpr, SECOND_HALF: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """S_ia = S_ai for SECOND_HALF entries i in the upper and all a in the lower half; ROWS of the e entries of the
    values."""
    block, rest = split_program_id(E // ROWS)
    state = rest // chunk_count * state_count + rest % chunk_count + first_state
    rows = (block * ROWS + tl.arange(0, ROWS))[None, :, None]
    major, minor = tl.arange(0, HALF_DIM)[:, None, None], tl.arange(0, HALF_DIM)[None, None, :]
    offsets = (major * E + rows) * (2 * HALF_DIM) + minor
    first_half_ptr += state * (HALF_DIM * E * 2 * HALF_DIM) + HALF_DIM
    second_half_ptr += state * (SECOND_HALF * E * 2 * HALF_DIM)
    block = tl.permute(tl.load(first_half_ptr + offsets, mask=minor < SECOND_HALF), (2, 1, 0))
    tl.store(second_half_ptr + offsets, block, mask=major < SECOND_HALF)


def _mirror(first_half: Tensor, second_half: Tensor, where: tuple[int, ...]) -> None:
    """Fills the columns a < d/2 of `second_half` with those a ≥ d/2 of `first_half`."""
    batch, heads, state_count, half, value_dim, _ = first_half.shape
    count, _, _, first_state, _ = where
    rows = min(value_dim, max(1, MIRROR_SIZE // half**2))
    launch(
        mirror_kernel,
        flat_grid(value_dim // rows, count, batch * heads),
        first_half,
        second_half,
        count,
        state_count,
        first_state,
        HALF_DIM=half,
        SECOND_HALF=second_half.shape[3],
        E=value_dim,
        ROWS=rows,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _scan_block(
    block, kv_sequence, x_ptr, out_ptr, begin_ptr, end_ptr, other_ptr, product_ptr, product_stride, gate_sums_ptr,
    length, state_count, first, chunk, size, stride_start, stride_end, unit, out_scale, other_scale,
    GATED: tl.constexpr, REVERSE: tl.constexpr, STARTED: tl.constexpr, GIVEN: tl.constexpr, KEPT: tl.constexpr,
    RETURN_END: tl.constexpr, MULTIPLIED: tl.constexpr, BLOCK: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """The scan of one block of the states' numbers, boundary by boundary."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    base = kv_sequence.to(tl.int64) * state_count * size
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
    if GIVEN:
        state = tl.load(begin_ptr + kv_sequence.to(tl.int64) * stride_start + offsets)
        if FLOAT16:
            state *= unit
    else:
        state = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, state_count, num_stages=4):
        state_index = state_count - 1 - step if REVERSE else step
        if GATED:
            # Between this boundary and the previously visited one; at the first there is nothing to decay.
            later = first + state_index + REVERSE
            log_decay = sum_at(gate_sums_ptr, later, chunk, length) - sum_at(gate_sums_ptr, later - 1, chunk, length)
            state *= tl.where(step > 0, tl.exp(log_decay.to(tl.float32)), 1.0)
        # The first boundary of a scan with a start has no chunk of its own.
        own = tl.full((BLOCK,), step > 0, tl.int1) if STARTED else tl.full((BLOCK,), True, tl.int1)
        state += tl.load(x_ptr + base + state_index.to(tl.int64) * size + offsets, mask=own, other=0.0).to(tl.float32)
        if KEPT:
            kept = state * out_scale if FLOAT16 else state
            tl.store(out_ptr + base + state_index.to(tl.int64) * size + offsets, kept.to(out_ptr.dtype.element_ty))
        if MULTIPLIED:
            other = tl.load(other_ptr + base + state_index.to(tl.int64) * size + offsets).to(tl.float32)
            target = product_ptr + (kv_sequence.to(tl.int64) * state_count + state_index) * product_stride
            product = tl.sum(state * other, axis=0)
            tl.store(target, product / unit / other_scale if FLOAT16 else product)
    if RETURN_END:
        if FLOAT16:
            state /= unit
        tl.store(end_ptr + kv_sequence.to(tl.int64) * stride_end + offsets, state)


@triton.jit
def scan_kernel(
    xs, outs, begins, ends, others, product_ptr, gate_sums_ptr, scales_ptr, other_scales_ptr, length, state_count,
    first, chunk, sizes, start_strides, end_strides, programs,
    GATED: tl.constexpr, REVERSE: tl.constexpr, STARTED: tl.constexpr, GIVEN: tl.constexpr, KEPT: tl.constexpr,
    RETURN_END: tl.constexpr, MULTIPLIED: tl.constexpr, BLOCK: tl.constexpr,
    FLOAT16: tl.constexpr = False, SCALES: tl.constexpr = 0, KV_SCALE: tl.constexpr = 0,
    NORMALIZER_SCALE: tl.constexpr = 0, OTHER_SCALES: tl.constexpr = 0, OTHER_KV_SCALE: tl.constexpr = 0,
    OTHER_NORMALIZER_SCALE: tl.constexpr = 0,
):  # fmt: skip
    """state_s = x_s + exp(G_s − G_{s−1}) state_{s−1} over the boundaries s; REVERSE: from the last one backwards.

    One launch scans Z and both halves of S: Z alone is so small that its loads would only wait for each other.

    STARTED: the first boundary visited is that of the start, which is zero unless GIVEN. KEPT: store all states.
    RETURN_END: store the last one visited in float32. MULTIPLIED: store each CTA's partial inner products with other
    states. FLOAT16: sums of S have a scale, and so have all stored states; starts, ends and inner products have none.
    """
    program, kv_sequence = split_program_id(programs, tl.int32)
    block = program
    for n in tl.static_range(3):
        blocks = sizes[n] // BLOCK
        if (block >= 0) & (block < blocks):
            # What starts and ends are multiplied by, what states are multiplied by further, and the others' scale.
            unit, out_scale, other_scale = 1.0, 1.0, 1.0
            if FLOAT16:
                unit = tl.load(scales_ptr + kv_sequence * SCALES + GRADIENT_FACTOR) if REVERSE else 1.0
                if n == 0:
                    if REVERSE:
                        unit *= tl.load(scales_ptr + kv_sequence * SCALES + VALUE_FACTOR)
                    out_scale = tl.load(scales_ptr + kv_sequence * SCALES + NORMALIZER_SCALE)
                else:
                    unit *= tl.load(scales_ptr + kv_sequence * SCALES + KV_SCALE)
                if MULTIPLIED:
                    column = OTHER_NORMALIZER_SCALE if n == 0 else OTHER_KV_SCALE
                    other_scale = tl.load(other_scales_ptr + kv_sequence * OTHER_SCALES + column)
            _scan_block(
                block, kv_sequence, xs[n], outs[n], begins[n], ends[n], others[n],
                product_ptr + program if MULTIPLIED else None, programs, gate_sums_ptr, length, state_count, first,
                chunk, sizes[n], start_strides[n], end_strides[n], unit, out_scale, other_scale,
                GATED, REVERSE, STARTED, GIVEN, KEPT, RETURN_END, MULTIPLIED, BLOCK, FLOAT16,
            )  # fmt: skip
        block -= blocks


def _scan(
    chunks: ChunkSums,
    outs: StateTensors,
    starts: StateTensors,
    ends: StateTensors,
    others: StateTensors,
    other_scales: StateScales | None = None,
) -> Tensor | None:
    """Launches the scan; returns partial inner products with `others`, if given: (b, h_kv, n, CTAs)."""
    xs = chunks.tensors
    batch, heads, state_count = xs[0].shape[:3]
    sizes = tuple(x.stride(2) for x in xs)
    block = min(1024, *sizes)
    programs = sum(sizes) // block
    products = None if others[0] is None else xs[0].new_empty(batch, heads, state_count, programs, dtype=torch.float32)
    launch(
        scan_kernel, flat_grid(programs, batch * heads),
        xs, outs, starts, ends, others, products, chunks.gate_sums, chunks.scales and chunks.scales.tensor,
        other_scales and other_scales.tensor, chunks.length, state_count, chunks.first, chunks.chunk, sizes,
        _head_strides(starts), _head_strides(ends), programs,
        GATED=chunks.gate_sums is not None, REVERSE=chunks.reverse, STARTED=chunks.started, GIVEN=starts[0] is not None,
        KEPT=outs[0] is not None, RETURN_END=ends[0] is not None, MULTIPLIED=products is not None, BLOCK=block,
        **scan_scales(chunks.scales, other_scales), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return products


def scan_scales(own: StateScales | None, other: StateScales | None) -> dict[str, Any]:
    """The arguments of the scan that say where the scales are."""
    if own is None:
        return {}
    found = {
        "FLOAT16": True,
        "SCALES": own.columns,
        "KV_SCALE": own.kv_column,
        "NORMALIZER_SCALE": own.normalizer_column,
    }
    if other is not None:
        found |= {
            "OTHER_SCALES": other.columns,
            "OTHER_KV_SCALE": other.kv_column,
            "OTHER_NORMALIZER_SCALE": other.normalizer_column,
        }
    return found


def _head_strides(tensors: StateTensors) -> tuple[int, ...]:
    return tuple(0 if x is None else x.stride(1) for x in tensors)


def boundaries_with_states(length: int, chunk: int, initial: bool, return_state: bool) -> tuple[int, int]:
    """The first and last chunk boundary that has a state; boundary n lies after n chunks."""
    chunks = ceil_div(length, chunk)
    return (0 if initial else 1), (chunks if return_state else chunks - 1)


def entries_of_second_half(dim: int, key_dim: int | None) -> int:
    """How many entries i ≥ d/2 of padded keys (b, t, h_kv, d) have an S_i in `ChunkStates.second_half`.

    Args:
        key_dim: entries after which the keys are padded with zeros; None: all d of them.
    """
    half = dim // 2
    wanted = half if key_dim is None else ENTRY_MULTIPLE * -(-(key_dim - half) // ENTRY_MULTIPLE)
    return min(half, max(ENTRY_MULTIPLE, wanted))


def update(
    x: Tensor, y: Tensor, decayed_transposed: Tensor, out: Tensor, where: tuple[int, ...], first_entry: int,
    columns: int, scales: StateScales | None = None,
    *, entries: int = 2, warps: int = 4, stages: int = 3, registers: int | None = None,
) -> None:  # fmt: skip
    """Writes the last columns of S_i of each chunk for half of the entries i, from `first_entry` on.

    Args:
        x, y, scales: as in `chunk_sums`.
        decayed_transposed: what `decay_and_transpose_kernel` writes, (b, h, tiles, d, 64).
        out: a half of `ChunkSums`, (b, h_kv, n, ≤ d/2, e, d) or (…, columns).
        where: chunks, states per sequence, first chunk, first state, and tokens per chunk.
        columns: how many of the columns a of S_ia are computed.
    """
    batch, _, heads, dim = x.shape
    kv_heads, value_dim = out.shape[1], out.shape[4]
    together = entries * dim // columns  # as many as fit in registers
    groups = out.shape[3] // together
    launch(
        update_kernel, flat_grid(groups, where[0], batch * kv_heads),
        head_major(x, (TILE_TOKENS, columns)), head_major(y, (TILE_TOKENS, value_dim)),
        blocks_of(decayed_transposed.flatten(0, 3), [1, TILE_TOKENS]),
        blocks_of(out.flatten(0, 2), [1, 1, value_dim, columns]), scales and scales.tensor,
        decayed_transposed.shape[2], kv_heads, *where, first_entry, dim - columns, out.shape[-1] - columns, groups,
        GROUP=heads // kv_heads, D=dim, E=value_dim, COLUMNS=columns, ENTRIES=together,
        PRECISION=dot_precision(x.dtype), TOKENS=TILE_TOKENS, STAGES=stages, **_token_scales(scales),
        **({} if scales is None else {"KV_SCALE": scales.kv_column}),
        num_warps=warps, **register_limit(registers), enable_fp_fusion=True,
    )  # fmt: skip


def _token_scales(scales: StateScales | None) -> dict[str, Any]:
    """The arguments of both kernels that say where the scales of tokens are."""
    return {} if scales is None else {"FLOAT16": True, "SCALES": scales.columns, "TOKEN_SCALE": scales.token_column}


def chunk_sums(
    x: Tensor,
    y: Tensor,
    kv_heads: int,
    gates: Gates | None,
    chunk: int,
    *,
    queries: QueryTerms | None = None,
    full: bool = False,
    boundaries: tuple[int, int] | None = None,
    precise: bool = False,
    key_dim: int | None = None,
    scales: StateScales | None = None,
    update: Callable[..., None] = update,
) -> ChunkSums | None:
    """The sums of each chunk alone, from keys x (b, t, h_kv, d) and values y (b, t, h_kv, e); None without boundaries.

    Args:
        queries: sums over the queries x (b, t, h, d) and output gradients y (b, t, h, e) after each boundary instead.
        full: return all d² features, also those that symmetry makes redundant.
        boundaries: the first and the last with a state; None: those between chunks. The first is 0 or 1, the last that
            between the last two chunks or that after the last one. Boundary 0, or in reverse the one after the last
            chunk, is for the start of the scan.
        precise: keep S in float32.
        key_dim: entries of x after which it is padded with zeros; None: all d of them.
        scales: of float16 states or their gradients; else None.
        update: what computes S: `update` above with its tiles, or that of `hopper.states`.
    """
    x, y = aligned(x), aligned(y)
    batch, length, heads, dim = x.shape
    value_dim = y.shape[-1]
    chunks = ceil_div(length, chunk)
    first, last = boundaries or (1, chunks - 1)
    state_count = last - first + 1
    if state_count == 0:
        return None
    gate_sums = None if gates is None else gates.sums
    reverse = queries is not None
    half_dim = dim // 2
    second_entries = entries_of_second_half(dim, key_dim)
    all_tiles = chunks * chunk // TILE_TOKENS
    dtype = torch.float32 if precise else x.dtype
    decayed_transposed = x.new_empty(batch, heads, all_tiles, dim, TILE_TOKENS)
    normalizer = x.new_empty(batch, kv_heads, state_count, dim, dim, dtype=torch.float32)
    sizes = (half_dim, value_dim, dim), (second_entries, value_dim, dim if full else half_dim)
    first_half, second_half = (x.new_empty(batch, kv_heads, state_count, *size, dtype=dtype) for size in sizes)
    limited = dim <= 64 and x.dtype != torch.float32 and limits_of(x).asynchronous
    # Tokens of a chunk count at the boundary after it, in reverse at the one before it.
    count = chunks - first if reverse else last
    where = (count, state_count, *((first, 0) if reverse else (0, 1 - first)), chunk)
    if count:
        minus_delta, state_share, factor = queries or (None, None, None)
        launch(
            decay_and_transpose_kernel, flat_grid(count, batch * kv_heads),
            head_major(x, (TILE_TOKENS, dim)), gate_sums, minus_delta, factor, state_share, scales and scales.tensor,
            decayed_transposed, normalizer, length, all_tiles,
            0 if minus_delta is None else minus_delta.shape[-1], kv_heads, *where,
            GROUP=heads // kv_heads, D=dim, GATED=gate_sums is not None, REVERSE=reverse,
            PRECISION=dot_precision(x.dtype), TOKENS=TILE_TOKENS, **_token_scales(scales),
            num_warps=4, **register_limit(TRANSPOSE_REGISTERS if limited else None), enable_fp_fusion=True,
        )  # fmt: skip
        update(x, y, decayed_transposed, first_half, where, 0, dim, scales)
        # The columns a < d/2 of the second half are known by symmetry.
        update(x, y, decayed_transposed, second_half, where, half_dim, half_dim, scales)
        if full:
            _mirror(first_half, second_half, where)
    started = last == chunks if reverse else first == 0
    return ChunkSums(
        first_half, second_half, normalizer, x.dtype, gate_sums, length, chunk, first, started, reverse, scales
    )


def end_alone(chunks: ChunkSums) -> FullState:
    """The end of the scan if it started from zero, float32; needs all d² features."""
    end = _empty_end(chunks)
    _scan(chunks, NO_TENSORS, NO_TENSORS, _tensors(end, chunks), NO_TENSORS)
    return end


def scan_sums(
    chunks: ChunkSums,
    start: FullState | None = None,
    *,
    return_end: bool = False,
    other: ChunkStates | None = None,
    other_scales: StateScales | None = None,
) -> tuple[ChunkStates, FullState | None, Tensor | None]:
    """States at the boundaries of chunks. Sums in the dtype of the states are overwritten.

    Args:
        chunks: with all d² features if there is `start`, `return_end` or `other`.
        start: the start of the scan: the state at boundary 0, or in reverse the gradient at the last one.
        return_end: whether to return the end of the scan in float32: the state after the last token, or the gradient of
            the initial state. The sums of chunks should then be `precise`.
        other: states at the same boundaries, with all features, for inner products with these.
        other_scales: of those states, if they are float16.

    Returns:
        the states; the end if wanted; and the inner products of the states with `other`, (b, h_kv, n) float64, if
        given.
    """
    assert chunks.started == (start is not None)
    first_half, second_half = (
        x if x.dtype == chunks.dtype else torch.empty_like(x, dtype=chunks.dtype) for x in chunks.tensors[1:]
    )
    normalizer = torch.empty_like(chunks.normalizer, dtype=chunks.dtype)
    end = _empty_end(chunks) if return_end else None
    others = (other.normalizer, other.first_half, other.second_half) if other else NO_TENSORS
    starts, ends = _tensors(start, chunks), _tensors(end, chunks)
    products = _scan(chunks, (normalizer, first_half, second_half), starts, ends, others, other_scales)
    total = None if products is None else products.sum(-1, dtype=torch.float64)
    return ChunkStates(first_half, second_half, normalizer, chunks.chunk, chunks.first), end, total


def _empty_end(chunks: ChunkSums) -> FullState:
    batch, heads, _, half, value_dim, dim = chunks.first_half.shape
    kv = chunks.normalizer.new_empty(batch, heads, 2 * half, value_dim, dim)
    kv[:, :, half + chunks.second_half.shape[3] :].zero_()
    return FullState(kv, kv.new_empty(batch, heads, dim, dim))


def _tensors(state: FullState | None, chunks: ChunkSums) -> StateTensors:
    """Views of a state that correspond to the tensors of `chunks`."""
    if state is None:
        return NO_TENSORS
    first_half, second_half = chunks.first_half.shape[3], chunks.second_half.shape[3]
    return state.normalizer, state.kv[:, :, :first_half], state.kv[:, :, first_half : first_half + second_half]
