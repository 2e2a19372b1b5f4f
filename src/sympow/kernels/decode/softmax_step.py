"""One token of softmax attention from a key/value cache: rotate, append the token and attend in one kernel.

The keys of a head are split among CTAs, as in FlashDecoding; each keeps a running maximum for every row of its tile,
and the last CTA of a head to finish combines their sums with the token itself. The number of cached tokens is in device
memory, so that a captured CUDA graph can be replayed at any fill level, and only keys that are there are read.

`sympow.kernels.decode.reference.softmax_step_reference` is the plain PyTorch reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import LOG2_E
from sympow.kernels.decode.state_step import (
    BLOCK_SPLITS,
    Exchange,
    Outputs,
    RecentTokens,
    Sizes,
    SplitArguments,
    Strides,
    Token,
    empty_output,
    load_rotated,
    phase_after,
    vector_block,
)
from sympow.kernels.launch import ceil_div, launch
from sympow.kernels.rotary import TWO_PI, cos_sin

# As `sympow.ops.torch.softmax.CLOSED_GATE`.
CLOSED_GATE = tl.constexpr(-1e5)
# Below every logit, but finite, so that the difference of two is not NaN.
LOWEST = tl.constexpr(-1e30)
# Keys scored at once; the fewest keys of one CTA; and CTAs over all heads: several times as many as run at once, so
# that multiprocessors do not idle at the end.
BLOCK_KEYS = 64
MIN_KEYS_PER_SPLIT = 256
PROGRAMS = 4096
WARPS = 4


@triton.jit
def softmax_step_kernel(
    token, cache, exchange, out, sizes, splits, strides,
    GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, ROTATED: tl.constexpr,
    SCALED: tl.constexpr, PER_PAIR: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """CTA (sequence, split): some keys of one head. The arguments are the NamedTuples of `state_step`."""
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = sequence // sizes.heads, sequence % sizes.heads
    entries, columns = tl.arange(0, DIM), tl.arange(0, COLUMNS)
    known_entries, inside = entries < sizes.dim, columns < sizes.value_dim
    pairs = tl.arange(0, DIM // 2)
    known = pairs < sizes.dim // 2
    pair_offsets = sequence * (sizes.dim // 2) + pairs
    cos, sin = 1.0, 0.0
    if ROTATED:
        revolutions = phase_after(token, sequence, pairs, pair_offsets, known, SCALED, PER_PAIR)
        cos, sin = cos_sin(revolutions)
    count = tl.load(cache.count + sequence)
    keys_ptr = cache.k + sequence * sizes.capacity * sizes.dim
    values_ptr = cache.v + sequence * sizes.capacity * sizes.value_dim
    total = tl.full((), 0.0, tl.float64)
    if GATED:
        held_decay_ptr = cache.decay + sequence * sizes.capacity
        total += tl.load(held_decay_ptr + count - 1, mask=count > 0, other=0.0)
        total += tl.maximum(tl.load(token.log_gamma + sequence).to(tl.float64), CLOSED_GATE)
    key = load_rotated(token.k + batch * strides.k_batch + head * strides.k_head, cos, sin, known_entries, DIM, ROTATED)
    value = tl.load(
        token.v + batch * strides.v_batch + head * strides.v_head + columns, mask=inside, other=0.0
    ).to(tl.float32)  # fmt: skip
    queries = ()
    for member in tl.static_range(GROUP):
        source = token.q + batch * strides.q_batch + (head * GROUP + member) * strides.q_head
        # In units of log 2, so that exp2 replaces exp.
        queries = queries + (load_rotated(source, cos, sin, known_entries, DIM, ROTATED) * (SCALE * LOG2_E),)

    first = split * splits.keys_per_split
    stop = tl.minimum(first + splits.keys_per_split, count)
    sums = (tl.zeros((KEYS, COLUMNS), tl.float32),) * GROUP
    weights = (tl.zeros((KEYS,), tl.float32),) * GROUP
    largest = (tl.full((KEYS,), LOWEST, tl.float32),) * GROUP
    for start in tl.range(first, stop, KEYS):
        positions = start + tl.arange(0, KEYS)
        seen = positions < stop
        past_keys = tl.load(keys_ptr + positions[:, None] * sizes.dim + entries[None, :],
                            mask=seen[:, None] & known_entries[None, :], other=0.0)  # fmt: skip
        past_values = tl.load(values_ptr + positions[:, None] * sizes.value_dim + columns[None, :],
                              mask=seen[:, None] & inside[None, :], other=0.0)  # fmt: skip
        since = tl.zeros((KEYS,), tl.float32)
        if GATED:
            since += (total - tl.load(held_decay_ptr + positions, mask=seen, other=0.0)).to(tl.float32)
            seen = seen & (since > CLOSED_GATE)
        next_sums = ()
        next_weights = ()
        next_largest = ()
        for member in tl.static_range(GROUP):
            logit = tl.sum(past_keys.to(tl.float32) * queries[member][None, :], axis=1) + since * LOG2_E
            logit = tl.where(seen, logit, LOWEST)
            most = tl.maximum(largest[member], logit)
            shrink = tl.exp2(largest[member] - most)
            weight = tl.where(seen, tl.exp2(logit - most), 0.0)
            next_sums = next_sums + (sums[member] * shrink[:, None] + weight[:, None] * past_values.to(tl.float32),)
            next_weights = next_weights + (weights[member] * shrink + weight,)
            next_largest = next_largest + (most,)
        sums = next_sums
        weights = next_weights
        largest = next_largest
    mine = (sequence * splits.count + split) * GROUP
    for member in tl.static_range(GROUP):
        most = tl.max(largest[member], axis=0)
        shrink = tl.exp2(largest[member] - most)
        tl.store(exchange.partial + (mine + member) * COLUMNS + columns, tl.sum(sums[member] * shrink[:, None], axis=0))
        tl.store(exchange.denominators + (mine + member) * 2, tl.sum(weights[member] * shrink, axis=0))
        tl.store(exchange.denominators + (mine + member) * 2 + 1, most)
    if (count >= first) & (count < tl.minimum(first + splits.keys_per_split, sizes.capacity)):
        tl.store(keys_ptr + count * sizes.dim + entries, key.to(keys_ptr.dtype.element_ty), mask=known_entries)
        tl.store(values_ptr + count * sizes.value_dim + columns, value.to(values_ptr.dtype.element_ty), mask=inside)
        if GATED:
            tl.store(held_decay_ptr + count, total)

    tl.debug_barrier()  # all threads have written their sums before the CTA counts as finished
    arrived = tl.atomic_add(exchange.arrivals + sequence, 1, sem="acq_rel")
    if arrived == splits.count - 1:
        tl.store(exchange.arrivals + sequence, 0)
        tl.store(cache.count + sequence, tl.minimum(count + 1, sizes.capacity))
        if ROTATED:
            # As for keys and values: a full cache is not changed. Compared as a block: Triton 3.9's interpreter
            # refuses masks made of one number's condition.
            tl.store(
                token.phase + pair_offsets,
                (revolutions - tl.floor(revolutions + 0.5)) * TWO_PI,
                mask=known & (tl.broadcast_to(count, (DIM // 2,)) < sizes.capacity),
            )
        for member in tl.static_range(GROUP):
            reference = tl.sum(queries[member] * key, axis=0)  # first the token's own logit, then the largest so far
            numerator = value
            denominator = tl.full((), 1.0, tl.float32)
            for start in tl.range(0, splits.count, SPLITS):
                index = start + tl.arange(0, SPLITS)
                there = index < splits.count
                found = (sequence * splits.count + index) * GROUP + member
                # Loads bypass the L1 cache, which does not see what other multiprocessors wrote.
                pointers = exchange.partial + found[:, None] * COLUMNS + columns[None, :]
                partial = tl.load(pointers, mask=there[:, None], other=0.0, cache_modifier=".cg")
                partial_weights = tl.load(
                    exchange.denominators + found * 2, mask=there, other=0.0, cache_modifier=".cg"
                )
                highs = tl.load(exchange.denominators + found * 2 + 1, mask=there, other=LOWEST, cache_modifier=".cg")
                raised = tl.maximum(reference, tl.max(highs, axis=0))
                before, factors = tl.exp2(reference - raised), tl.exp2(highs - raised)
                numerator = numerator * before + tl.sum(partial * factors[:, None], axis=0)
                denominator = denominator * before + tl.sum(partial_weights * factors, axis=0)
                reference = raised
            y = numerator / denominator
            y = tl.where(count < sizes.capacity, y, float("nan"))  # the cache is full: make the error visible
            target = out.y + (sequence * GROUP + member) * sizes.value_dim + columns
            tl.store(target, y.to(out.y.dtype.element_ty), mask=inside)


def split_keys(sequences: int, capacity: int) -> tuple[int, int]:
    """How many CTAs score the keys of a head, and how many keys each."""
    per_split = max(MIN_KEYS_PER_SPLIT, ceil_div(capacity, max(1, PROGRAMS // sequences)))
    keys_per_split = ceil_div(per_split, BLOCK_KEYS) * BLOCK_KEYS
    return ceil_div(capacity, keys_per_split), keys_per_split


def softmax_workspace(sequences: int, group: int, value_dim: int, capacity: int) -> int:
    """How many float32 numbers the CTAs of a step exchange."""
    splits, _ = split_keys(sequences, capacity)
    return sequences * splits * group * (triton.next_power_of_2(value_dim) + 2)


def softmax_step(token: Token, cache: RecentTokens, arrivals: Tensor, workspace: Tensor) -> Tensor:
    """y (b, h, e) of one token, which is appended to the cache; `token.phase` is updated in place.

    Args:
        cache: rotated keys (b, h_kv, W, d); values (b, h_kv, W, e); running sums of log γ, (b, h_kv, W) float64, or
            None without gates; and the number of cached tokens, (b, h_kv) int32, which is incremented.
        arrivals: zeros, (b, h_kv) int32, left as zeros.
        workspace: `softmax_workspace` numbers of float32, uninitialized.
    """
    (batch, heads, dim), value_dim = token.k.shape, token.v.shape[-1]
    capacity, group = cache.k.shape[2], token.q.shape[1] // heads
    columns = triton.next_power_of_2(value_dim)
    splits, keys_per_split = split_keys(batch * heads, capacity)
    out = Outputs(empty_output(token))
    lengths = [batch * heads * splits * group * columns, batch * heads * splits * group * 2]
    partial, denominators = workspace[: sum(lengths)].split(lengths)
    launch(
        softmax_step_kernel, (batch * heads, splits),
        token, cache, Exchange(arrivals, None, partial, denominators), out, Sizes(heads, 0, dim, value_dim, capacity),
        SplitArguments(splits, 0, keys_per_split, 0), Strides.of(token),
        GROUP=group, DIM=vector_block(dim), COLUMNS=columns, GATED=token.log_gamma is not None,
        ROTATED=token.theta is not None, SCALED=token.beta is not None,
        PER_PAIR=token.beta is not None and token.beta.ndim == 3, SCALE=dim**-0.5, KEYS=BLOCK_KEYS, SPLITS=BLOCK_SPLITS,
        num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return out.y
