"""One token of softmax attention with a cache: rotate, write the token behind the cache, attend, all in one kernel.

The keys of a head are divided among programs; each scores some, with a running maximum for every place of its tile, and
the last program of a head to come joins their sums, and the token itself. How many tokens the cache holds stands in
memory, so that a captured graph may be replayed at any filling, and only what is there is read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import LOG2_E
from sympow.kernels.decode.state_step import BLOCK_PARTS, turned, turns_after, vector_block
from sympow.kernels.rotary import TURN, cos_sin

# As `sympow.ops.torch.softmax.CLOSED_GATE`.
CLOSED_GATE = tl.constexpr(-1e5)
# Below every logit, yet finite: differences of two are no NaN.
LOWEST = tl.constexpr(-1e30)
# Keys scored at once, keys of a program at least, and programs over all heads: several times as many as run at once,
# so that the last of them do not leave the others waiting.
BLOCK_KEYS = 64
LEAST_KEYS_PER_PART = 256
PROGRAMS = 4096
WARPS = 4


@triton.jit
def softmax_step_kernel(
    q_ptr, k_ptr, v_ptr, log_gamma_ptr, beta_ptr, theta_ptr, phase_ptr, cache_keys_ptr, values_ptr, sums_ptr, count_ptr,
    arrivals_ptr, partial_ptr, totals_ptr, y_ptr,
    heads, dim, value_dim, capacity, parts, keys_per_part,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, ROTATED: tl.constexpr,
    SCALED: tl.constexpr, PER_PAIR: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part): some keys of one head."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    entries, columns = tl.arange(0, DIM), tl.arange(0, COLUMNS)
    known_entries, inside = entries < dim, columns < value_dim
    pairs = tl.arange(0, DIM // 2)
    known = pairs < dim // 2
    at = sequence * (dim // 2) + pairs
    cos, sin = 1.0, 0.0
    if ROTATED:
        turns = turns_after(theta_ptr, beta_ptr, phase_ptr, sequence, pairs, at, known, SCALED, PER_PAIR)
        cos, sin = cos_sin(turns)
    count = tl.load(count_ptr + sequence)
    cache_keys_ptr += sequence * capacity * dim
    values_ptr += sequence * capacity * value_dim
    total = tl.full((), 0.0, tl.float64)
    if GATED:
        sums_ptr += sequence * capacity
        total += tl.load(sums_ptr + count - 1, mask=count > 0, other=0.0)
        total += tl.maximum(tl.load(log_gamma_ptr + sequence).to(tl.float64), CLOSED_GATE)
    key = turned(k_ptr + batch * k_batch + head * k_head, cos, sin, known_entries, DIM, ROTATED)
    value = tl.load(v_ptr + batch * v_batch + head * v_head + columns, mask=inside, other=0.0).to(tl.float32)
    queries = ()
    for member in tl.static_range(GROUP):
        source = q_ptr + batch * q_batch + (head * GROUP + member) * q_head
        # In units of log 2, so that powers of two do for exponentials.
        queries = queries + (turned(source, cos, sin, known_entries, DIM, ROTATED) * (SCALE * LOG2_E),)

    first = part * keys_per_part
    stop = tl.minimum(first + keys_per_part, count)
    sums = (tl.zeros((KEYS, COLUMNS), tl.float32),) * GROUP
    weights = (tl.zeros((KEYS,), tl.float32),) * GROUP
    largest = (tl.full((KEYS,), LOWEST, tl.float32),) * GROUP
    for start in tl.range(first, stop, KEYS):
        slots = start + tl.arange(0, KEYS)
        seen = slots < stop
        past_keys = tl.load(cache_keys_ptr + slots[:, None] * dim + entries[None, :],
                            mask=seen[:, None] & known_entries[None, :], other=0.0)  # fmt: skip
        past_values = tl.load(values_ptr + slots[:, None] * value_dim + columns[None, :],
                              mask=seen[:, None] & inside[None, :], other=0.0)  # fmt: skip
        since = tl.zeros((KEYS,), tl.float32)
        if GATED:
            since += (total - tl.load(sums_ptr + slots, mask=seen, other=0.0)).to(tl.float32)
            seen = seen & (since > CLOSED_GATE)
        next_sums = ()
        next_weights = ()
        next_largest = ()
        for member in tl.static_range(GROUP):
            logit = tl.sum(past_keys.to(tl.float32) * queries[member][None, :], axis=1) + since * LOG2_E
            logit = tl.where(seen, logit, LOWEST)
            high = tl.maximum(largest[member], logit)
            shrink = tl.exp2(largest[member] - high)
            weight = tl.where(seen, tl.exp2(logit - high), 0.0)
            next_sums = next_sums + (sums[member] * shrink[:, None] + weight[:, None] * past_values.to(tl.float32),)
            next_weights = next_weights + (weights[member] * shrink + weight,)
            next_largest = next_largest + (high,)
        sums = next_sums
        weights = next_weights
        largest = next_largest
    mine = (sequence * parts + part) * GROUP
    for member in tl.static_range(GROUP):
        high = tl.max(largest[member], axis=0)
        shrink = tl.exp2(largest[member] - high)
        tl.store(partial_ptr + (mine + member) * COLUMNS + columns, tl.sum(sums[member] * shrink[:, None], axis=0))
        tl.store(totals_ptr + (mine + member) * 2, tl.sum(weights[member] * shrink, axis=0))
        tl.store(totals_ptr + (mine + member) * 2 + 1, high)
    if (count >= first) & (count < tl.minimum(first + keys_per_part, capacity)):
        tl.store(cache_keys_ptr + count * dim + entries, key.to(cache_keys_ptr.dtype.element_ty), mask=known_entries)
        tl.store(values_ptr + count * value_dim + columns, value.to(values_ptr.dtype.element_ty), mask=inside)
        if GATED:
            tl.store(sums_ptr + count, total)

    tl.debug_barrier()  # every thread's sums are written before the program says so
    arrived = tl.atomic_add(arrivals_ptr + sequence, 1, sem="acq_rel")
    if arrived == parts - 1:
        tl.store(arrivals_ptr + sequence, 0)
        tl.store(count_ptr + sequence, tl.minimum(count + 1, capacity))
        if ROTATED:
            # As for keys and values: without room for the token the cache stays as it is.
            tl.store(phase_ptr + at, (turns - tl.floor(turns + 0.5)) * TURN, mask=known & (count < capacity))
        for member in tl.static_range(GROUP):
            reference = tl.sum(queries[member] * key, axis=0)  # the token's own logit, then the largest
            numerator = value
            denominator = tl.full((), 1.0, tl.float32)
            for start in tl.range(0, parts, PARTS):
                index = start + tl.arange(0, PARTS)
                there = index < parts
                found = (sequence * parts + index) * GROUP + member
                # Past the first cache, which knows nothing of what other multiprocessors wrote.
                pointers = partial_ptr + found[:, None] * COLUMNS + columns[None, :]
                more = tl.load(pointers, mask=there[:, None], other=0.0, cache_modifier=".cg")
                more_weights = tl.load(totals_ptr + found * 2, mask=there, other=0.0, cache_modifier=".cg")
                highs = tl.load(totals_ptr + found * 2 + 1, mask=there, other=LOWEST, cache_modifier=".cg")
                raised = tl.maximum(reference, tl.max(highs, axis=0))
                before, part_factors = tl.exp2(reference - raised), tl.exp2(highs - raised)
                numerator = numerator * before + tl.sum(more * part_factors[:, None], axis=0)
                denominator = denominator * before + tl.sum(more_weights * part_factors, axis=0)
                reference = raised
            y = numerator / denominator
            y = tl.where(count < capacity, y, float("nan"))  # no room was left for the token: not to go unseen
            target = y_ptr + (sequence * GROUP + member) * value_dim + columns
            tl.store(target, y.to(y_ptr.dtype.element_ty), mask=inside)


def divide_keys(sequences: int, capacity: int) -> tuple[int, int]:
    """How many programs score the keys of a head, and how many keys each."""
    per_part = max(LEAST_KEYS_PER_PART, triton.cdiv(capacity, max(1, PROGRAMS // sequences)))
    keys_per_part = triton.cdiv(per_part, BLOCK_KEYS) * BLOCK_KEYS
    return triton.cdiv(capacity, keys_per_part), keys_per_part


def softmax_workspace(sequences: int, group: int, value_dim: int, capacity: int) -> int:
    """How many float32 numbers a step needs to pass between its programs."""
    parts, _ = divide_keys(sequences, capacity)
    return sequences * parts * group * (triton.next_power_of_2(value_dim) + 2)


def softmax_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    keys: Tensor,
    values: Tensor,
    sums: Tensor | None,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
) -> Tensor:
    """y (b, h, e) of one token, which is put behind the cache's.

    Args:
        q, k, v: (b, h, d), (b, h_kv, d), (b, h_kv, e), last axis contiguous.
        log_gamma: (b, h_kv) contiguous, or None.
        beta: (b, h_kv) or (b, h_kv, d/2) contiguous, or None.
        theta: (d/2,) contiguous, or None for no rotation.
        keys, values: turned keys (b, h_kv, W, d) and values (b, h_kv, W, e).
        sums: running sums of log γ, (b, h_kv, W) float64; None without gates.
        count: how many tokens the cache holds, (b, h_kv) int32; raised by one.
        phase: μ, (b, h_kv, d/2) float64, moved on by one token; None without rotation.
        arrivals: zeros, (b, h_kv) int32, left as zeros.
        workspace: `softmax_workspace` numbers of float32, whatever they hold.
    """
    batch, heads, dim = k.shape
    capacity, value_dim, group = keys.shape[2], v.shape[-1], q.shape[1] // heads
    columns = triton.next_power_of_2(value_dim)
    parts, keys_per_part = divide_keys(batch * heads, capacity)
    y = v.new_empty(batch, q.shape[1], value_dim)
    lengths = [batch * heads * parts * group * columns, batch * heads * parts * group * 2]
    partial, totals = workspace[: sum(lengths)].split(lengths)
    softmax_step_kernel[(batch * heads, parts)](
        q, k, v, log_gamma, beta, theta, phase, keys, values, sums, count, arrivals, partial, totals, y,
        heads, dim, value_dim, capacity, parts, keys_per_part,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        GROUP=group, DIM=vector_block(dim), COLUMNS=columns, GATED=log_gamma is not None, ROTATED=theta is not None,
        SCALED=beta is not None, PER_PAIR=beta is not None and beta.ndim == 3, SCALE=dim**-0.5, KEYS=BLOCK_KEYS,
        PARTS=BLOCK_PARTS, num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return y
