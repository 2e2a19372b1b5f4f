"""One token for every sequence of a batch: rotate, decay, update, query and normalise in one kernel.

The features of a key/value head are divided among programs. Each walks over its rows of the state once, sums φ(q) S and
φ(q) Z for every query head that reads this state, and, where the state is to change, writes γ S + φ(k) vᵀ as it goes.
Sums meet in memory: the program of a head that comes last adds them up in a fixed order, joins the token itself by its
score, and divides. What moves is the state, read once and written at most once.

A window (`sympow.kernels.decode.window_step`) adds programs that score its keys; the state is then only read.

Features are products of entries of a vector, looked up in memory: a program writes its turned vectors there and reads
them back through the first cache, which needs no barriers inside the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import EPSILON, even_power, or_one, power_of_two_scale
from sympow.kernels.rotary import TURN, cos_sin

# log γ^(1/p) of a closed gate, finite so that sums have differences, as in `sympow.ops.numerics`.
CLOSED_GATE_ROOT = tl.constexpr(-1000.0)
# Elements of the state that a program loads at once, and as many sums that it keeps for each query head; and programs
# that the state is divided among, just so many that all are in flight at once on an H200. Both as measured: a few too
# many programs for that cost a tenth.
TILE = 2048
PROGRAMS = 576
# Where wide rows are written too, smaller tiles leave room for more programs.
WIDE_UPDATE = 64
WIDE_UPDATE_TILE = 1024
WIDE_UPDATE_PROGRAMS = 768
WARPS = 4
# Sums that the last program of a head adds up at once.
BLOCK_PARTS = 8


@triton.jit
def _load_tile(kv_ptr, normalizer_ptr, pairs_ptr, weight_ptr, rows, valid, columns, inside, value_dim,
               POWER: tl.constexpr):  # fmt: skip
    """Some rows of a state, of its normaliser, of the features' weights, and of the entries that they multiply.

    The state passes through: what the caches hold already is more likely to be read again.
    """
    mask = valid[:, None] & inside[None, :]
    kv = tl.load(
        kv_ptr + rows[:, None] * value_dim + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )
    normalizer = tl.load(normalizer_ptr + rows, mask=valid, other=0.0)
    weight = tl.load(weight_ptr + rows, mask=valid, other=0.0)
    entries = ()
    for pair in tl.static_range(POWER // 2):
        entries = entries + (tl.load(pairs_ptr + rows * (POWER // 2) + pair, mask=valid, other=0),)
    return kv, normalizer, weight, entries


@triton.jit
def _features(vector_ptr, weight, entries, POWER: tl.constexpr):
    """φ at some rows of the feature list: products of POWER entries of a float32 vector in memory, times weights.

    `entries`: POWER / 2 tensors of indices, two in each int32.
    """
    product = weight
    for pair in tl.static_range(POWER // 2):
        product = product * tl.load(vector_ptr + (entries[pair] & 0xFFFF)) * tl.load(vector_ptr + (entries[pair] >> 16))
    return product


@triton.jit
def turns_after(theta_ptr, beta_ptr, phase_ptr, sequence, pairs, at, known, SCALED: tl.constexpr,
                PER_PAIR: tl.constexpr):  # fmt: skip
    """μ + β θ, the phase of the token at hand, in turns: float64. `at`: where the pairs of this head stand."""
    turns = tl.load(theta_ptr + pairs, mask=known, other=0.0).to(tl.float64) * (1 / TURN)
    if SCALED:
        if PER_PAIR:
            turns *= tl.load(beta_ptr + at, mask=known, other=0.0).to(tl.float64)
        else:
            turns *= tl.load(beta_ptr + sequence).to(tl.float64)
    return turns + tl.load(phase_ptr + at, mask=known, other=0.0) * (1 / TURN)


@triton.jit
def turned(pointer, cos, sin, mask, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """A vector of DIM entries, turned by the phase: float32."""
    x = tl.load(pointer + tl.arange(0, DIM), mask=mask, other=0.0).to(tl.float32)
    if ROTATED:
        even, odd = tl.split(tl.reshape(x, (DIM // 2, 2)))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (DIM,))
    return x


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, log_gamma_ptr, beta_ptr, theta_ptr, phase_ptr, kv_ptr, normalizer_ptr, pairs_ptr, weight_ptr,
    keys_ptr, values_ptr, sums_ptr, count_ptr, arrivals_ptr, vectors_ptr, partial_ptr, totals_ptr,
    y_ptr, phase_out_ptr, kv_out_ptr, normalizer_out_ptr,
    heads, features_count, dim, value_dim, capacity, parts, window_parts, keys_per_part, rows_per_part,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    GROUP: tl.constexpr, POWER: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
    ROTATED: tl.constexpr, SCALED: tl.constexpr, PER_PAIR: tl.constexpr, UPDATE: tl.constexpr, WINDOW: tl.constexpr,
    STATE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part): a chunk of the window's keys for the first `window_parts`, then some of the state's
    rows. UPDATE writes the state after the token; WINDOW writes the token behind the window's keys instead."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    entries, columns = tl.arange(0, DIM), tl.arange(0, COLUMNS)
    inside = columns < value_dim
    # The first rows of the state are on their way while queries and keys are turned.
    first_row = (part - window_parts) * rows_per_part
    last_row = tl.minimum(first_row + rows_per_part, features_count)
    rows = first_row + tl.arange(0, ROWS)
    if STATE:
        kv_ptr += sequence * features_count * value_dim
        normalizer_ptr += sequence * features_count
        following = _load_tile(kv_ptr, normalizer_ptr, pairs_ptr, weight_ptr, rows, (rows >= 0) & (rows < last_row),
                               columns, inside, value_dim, POWER)  # fmt: skip

    pairs = tl.arange(0, DIM // 2)
    known = pairs < dim // 2
    at = sequence * (dim // 2) + pairs
    cos, sin = 1.0, 0.0
    if ROTATED:
        turns = turns_after(theta_ptr, beta_ptr, phase_ptr, sequence, pairs, at, known, SCALED, PER_PAIR)
        cos, sin = cos_sin(turns)

    # The running sum of log γ^(1/p) since the state was left, this token's included.
    total = tl.full((), 0.0, tl.float64)
    count = 0
    if WINDOW:
        count = tl.load(count_ptr + sequence)
        total += tl.load(sums_ptr + sequence * capacity + count - 1, mask=count > 0, other=0.0)
    if GATED:
        total += tl.maximum(tl.load(log_gamma_ptr + sequence).to(tl.float64) * (1 / POWER), CLOSED_GATE_ROOT)
    gamma = tl.exp((total * POWER).to(tl.float32))

    vectors = vectors_ptr + (sequence * parts + part) * ((GROUP + 1) * DIM)
    key = turned(k_ptr + batch * k_batch + head * k_head, cos, sin, entries < dim, DIM, ROTATED)
    value = tl.load(v_ptr + batch * v_batch + head * v_head + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(vectors + entries, key)
    queries = ()
    for member in tl.static_range(GROUP):
        source = q_ptr + batch * q_batch + (head * GROUP + member) * q_head
        query = turned(source, cos, sin, entries < dim, DIM, ROTATED)
        query = query * power_of_two_scale(query[None, :])
        tl.store(vectors + (member + 1) * DIM + entries, query)
        queries = queries + (query,)
    tl.debug_barrier()  # what some threads wrote, others look up

    mine = (sequence * parts + part) * GROUP
    if WINDOW and part < window_parts:
        first = part * keys_per_part
        stop = tl.minimum(first + keys_per_part, count)
        recent = (tl.zeros((KEYS, COLUMNS), tl.float32),) * GROUP
        scores = (tl.zeros((KEYS,), tl.float32),) * GROUP
        for start in tl.range(first, stop, KEYS):
            slots = start + tl.arange(0, KEYS)
            seen = slots < stop
            slot = sequence * capacity + slots
            past_keys = tl.load(keys_ptr + (sequence * dim + entries)[None, :] * capacity + slots[:, None],
                                mask=seen[:, None] & (entries < dim)[None, :], other=0.0).to(tl.float32)  # fmt: skip
            past_values = tl.load(values_ptr + slot[:, None] * value_dim + columns[None, :],
                                  mask=seen[:, None] & inside[None, :], other=0.0).to(tl.float32)  # fmt: skip
            since = total - tl.load(sums_ptr + slot, mask=seen, other=0.0)
            decay = tl.where(seen, tl.exp((since * POWER).to(tl.float32)), 0.0)
            next_recent = ()
            next_scores = ()
            for member in tl.static_range(GROUP):
                score = even_power(tl.sum(past_keys * queries[member][None, :], axis=1), POWER) * decay
                next_recent = next_recent + (recent[member] + score[:, None] * past_values,)
                next_scores = next_scores + (scores[member] + score,)
            recent = next_recent
            scores = next_scores
        for member in tl.static_range(GROUP):
            tl.store(partial_ptr + (mine + member) * COLUMNS + columns, tl.sum(recent[member], axis=0))
            tl.store(totals_ptr + (mine + member) * 2, tl.sum(scores[member], axis=0))
        if (count >= first) & (count < tl.minimum(first + keys_per_part, capacity)):
            slot = sequence * capacity + count
            target = keys_ptr + (sequence * dim + entries) * capacity + count
            tl.store(target, key.to(keys_ptr.dtype.element_ty), mask=entries < dim)
            tl.store(values_ptr + slot * value_dim + columns, value.to(values_ptr.dtype.element_ty), mask=inside)
            tl.store(sums_ptr + slot, total)
    elif STATE:
        accs = (tl.zeros((ROWS, COLUMNS), tl.float32),) * GROUP
        weights = (tl.zeros((ROWS,), tl.float32),) * GROUP
        sizes = (tl.zeros((ROWS,), tl.float32),) * GROUP
        for start in tl.range(first_row, last_row, ROWS):
            kv, normalizer, weight, factors = following
            rows = start + ROWS + tl.arange(0, ROWS)
            following = _load_tile(kv_ptr, normalizer_ptr, pairs_ptr, weight_ptr, rows, rows < last_row,
                                   columns, inside, value_dim, POWER)  # fmt: skip
            next_accs = ()
            next_weights = ()
            next_sizes = ()
            for member in tl.static_range(GROUP):
                phi_query = _features(vectors + (member + 1) * DIM, weight, factors, POWER)
                next_accs = next_accs + (accs[member] + phi_query[:, None] * kv,)
                next_weights = next_weights + (weights[member] + phi_query * normalizer,)
                next_sizes = next_sizes + (sizes[member] + tl.abs(phi_query * normalizer),)
            accs = next_accs
            weights = next_weights
            sizes = next_sizes
            if UPDATE:
                rows = start + tl.arange(0, ROWS)
                valid = rows < last_row
                phi_key = _features(vectors, weight, factors, POWER)
                tl.store(kv_out_ptr + (sequence * features_count + rows)[:, None] * value_dim + columns[None, :],
                         kv * gamma + phi_key[:, None] * value[None, :], mask=valid[:, None] & inside[None, :],
                         eviction_policy="evict_first")  # fmt: skip
                target = normalizer_out_ptr + sequence * features_count + rows
                tl.store(target, normalizer * gamma + phi_key, mask=valid)
        for member in tl.static_range(GROUP):
            tl.store(partial_ptr + (mine + member) * COLUMNS + columns, tl.sum(accs[member], axis=0))
            tl.store(totals_ptr + (mine + member) * 2, tl.sum(weights[member], axis=0))
            tl.store(totals_ptr + (mine + member) * 2 + 1, tl.sum(sizes[member], axis=0))

    tl.debug_barrier()  # every thread's sums are written before the program says so
    arrived = tl.atomic_add(arrivals_ptr + sequence, 1, sem="acq_rel")
    if arrived == parts - 1:
        tl.store(arrivals_ptr + sequence, 0)
        if WINDOW:
            tl.store(count_ptr + sequence, tl.minimum(count + 1, capacity))
        if ROTATED:
            tl.store(phase_out_ptr + at, (turns - tl.floor(turns + 0.5)) * TURN, mask=known)
        for member in tl.static_range(GROUP):
            state_sums = tl.zeros((PARTS, COLUMNS), tl.float32)
            recent_sums = tl.zeros((PARTS, COLUMNS), tl.float32)
            state_weights = tl.zeros((PARTS,), tl.float32)
            recent_weights = tl.zeros((PARTS,), tl.float32)
            state_sizes = tl.zeros((PARTS,), tl.float32)
            for start in tl.range(0, parts, PARTS):
                index = start + tl.arange(0, PARTS)
                of_state, of_window = (index >= window_parts) & (index < parts), index < window_parts
                found = (sequence * parts + index) * GROUP + member
                pointers = partial_ptr + found[:, None] * COLUMNS + columns[None, :]
                # Past the first cache, which knows nothing of what other multiprocessors wrote.
                if STATE:
                    state_sums += tl.load(pointers, mask=of_state[:, None], other=0.0, cache_modifier=".cg")
                    state_weights += tl.load(totals_ptr + found * 2, mask=of_state, other=0.0, cache_modifier=".cg")
                    state_sizes += tl.load(totals_ptr + found * 2 + 1, mask=of_state, other=0.0, cache_modifier=".cg")
                if WINDOW:
                    recent_sums += tl.load(pointers, mask=of_window[:, None], other=0.0, cache_modifier=".cg")
                    recent_weights += tl.load(totals_ptr + found * 2, mask=of_window, other=0.0, cache_modifier=".cg")
            # The state's part, unless that is nothing but rounding; keys, the token's own among them, by their scores.
            past = tl.sum(state_weights, axis=0)
            rounding = past < tl.sum(state_sizes, axis=0) * EPSILON
            score = even_power(tl.sum(queries[member] * key, axis=0), POWER)
            denominator = tl.where(rounding, 0.0, past * gamma) + tl.sum(recent_weights, axis=0) + score
            numerator = tl.where(rounding, 0.0, tl.sum(state_sums, axis=0) * gamma) + tl.sum(recent_sums, axis=0)
            y = tl.where(denominator == 0, 0.0, (numerator + score * value) / or_one(denominator))
            if WINDOW:
                y = tl.where(count < capacity, y, float("nan"))  # no room was left for the token: not to go unseen
            target = y_ptr + (sequence * GROUP + member) * value_dim + columns
            tl.store(target, y.to(y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Division:
    """How the work on one head is divided among programs.

    Attributes:
        rows: features that a program loads at once.
        rows_per_part: features of a part.
        state_parts, window_parts: programs for the state and for the window's keys.
        keys_per_part: keys of a part.
    """

    rows: int
    rows_per_part: int
    state_parts: int
    window_parts: int = 0
    keys_per_part: int = 0

    @property
    def parts(self) -> int:
        return self.state_parts + self.window_parts


def divide_state(
    sequences: int, feature_count: int, value_dim: int, group: int, *, tile: int = TILE, programs: int = PROGRAMS
) -> Division:
    """Rows of a state to parts of about equal size, so that all heads together make about `programs`."""
    # Every query head of a group has sums of its own in registers.
    rows = max(8, tile // triton.next_power_of_2(value_dim) // max(1, triton.next_power_of_2(group) // 2))
    tiles = triton.cdiv(feature_count, rows)
    wanted = min(tiles, max(1, programs // sequences))
    rows_per_part = rows * triton.cdiv(tiles, wanted)
    return Division(rows, rows_per_part, triton.cdiv(feature_count, rows_per_part))


def vector_block(key_dim: int) -> int:
    """The power of two that holds a query or key, a pair at least."""
    return max(2, triton.next_power_of_2(key_dim))


def workspace_size(sequences: int, parts: int, group: int, key_dim: int, value_dim: int) -> int:
    """How many float32 numbers a step's programs need to pass between them."""
    per_part = (group + 1) * vector_block(key_dim) + group * (triton.next_power_of_2(value_dim) + 2)
    return sequences * parts * per_part


def launch_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    phase: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    index: Tensor | None,
    weight: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
    division: Division,
    power: int,
    *,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    sums: Tensor | None = None,
    count: Tensor | None = None,
    phase_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    normalizer_out: Tensor | None = None,
    block_keys: int = 32,
    warps: int = WARPS,
) -> Tensor:
    """y (b, h, e) of one token; `decode_step` and `window_step` explain the arguments."""
    batch, heads, dim = k.shape
    value_dim, group = v.shape[-1], q.shape[1] // heads
    block_dim, columns = vector_block(dim), triton.next_power_of_2(value_dim)
    if kv is not None and kv.shape[2] * value_dim >= 2**31:
        raise ValueError(f"kv holds {kv.shape[2] * value_dim} numbers a head; the kernels take fewer than 2³¹")
    y = v.new_empty(batch, q.shape[1], value_dim)
    programs = batch * heads * division.parts
    lengths = [programs * (group + 1) * block_dim, programs * group * columns, programs * group * 2]
    vectors, partial, totals = workspace[: sum(lengths)].split(lengths)
    step_kernel[(batch * heads, division.parts)](
        q, k, v, log_gamma, beta, theta, phase, kv, normalizer,
        None if index is None else index.view(torch.int32), weight,
        keys, values, sums, count, arrivals, vectors, partial, totals, y, phase_out, kv_out, normalizer_out,
        heads, 0 if weight is None else weight.shape[0], dim, value_dim, 0 if keys is None else keys.shape[-1],
        division.parts, division.window_parts, division.keys_per_part, division.rows_per_part,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        GROUP=group, POWER=power, DIM=block_dim, COLUMNS=columns, GATED=log_gamma is not None,
        ROTATED=theta is not None, SCALED=beta is not None, PER_PAIR=beta is not None and beta.ndim == 3,
        UPDATE=kv_out is not None, WINDOW=keys is not None, STATE=kv is not None, ROWS=division.rows, KEYS=block_keys,
        PARTS=BLOCK_PARTS, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor,
    normalizer: Tensor,
    phase: Tensor | None,
    index: Tensor,
    weight: Tensor,
    *,
    kv_out: Tensor | None = None,
    tile: int | None = None,
    programs: int | None = None,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y (b, h, e), and the state after one token.

    Args:
        q, k, v: (b, h, d), (b, h_kv, d), (b, h_kv, e), last axis contiguous.
        log_gamma: (b, h_kv) contiguous, or None.
        beta: (b, h_kv) or (b, h_kv, d/2) contiguous, or None.
        theta: (d/2,) contiguous, or None for no rotation.
        kv, normalizer: (b, h_kv, D, e) and (b, h_kv, D), float32, contiguous.
        phase: (b, h_kv, d/2) float64 contiguous, or None without rotation.
        index: which entries each feature multiplies, (D, p) int16.
        weight: √ of the features' multinomial coefficients, (D,) float32.
        kv_out: where to write the new kv; may be kv itself. None: a new tensor.
        tile, programs, warps: how the state is divided; None: as measured best.
    """
    batch, heads, feature_count, value_dim = kv.shape
    group = q.shape[1] // heads
    wide = value_dim >= WIDE_UPDATE
    tile = tile or (WIDE_UPDATE_TILE if wide else TILE)
    programs = programs or (WIDE_UPDATE_PROGRAMS if wide else PROGRAMS)
    division = divide_state(batch * heads, feature_count, value_dim, group, tile=tile, programs=programs)
    kv_out = torch.empty_like(kv) if kv_out is None else kv_out
    normalizer_out = torch.empty_like(normalizer)
    phase_out = None if phase is None else torch.empty_like(phase)
    arrivals = torch.zeros(batch * heads, dtype=torch.int32, device=kv.device)
    workspace = kv.new_empty(workspace_size(batch * heads, division.parts, group, k.shape[-1], value_dim))
    y = launch_step(
        q, k, v, log_gamma, beta, theta, phase, kv, normalizer, index, weight, arrivals, workspace, division,
        index.shape[1], phase_out=phase_out, kv_out=kv_out, normalizer_out=normalizer_out, warps=warps,
    )  # fmt: skip
    return y, kv_out, normalizer_out, phase_out
