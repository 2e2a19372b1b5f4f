"""One token for every sequence of a batch, from a state: rotate, decay, update, query and normalize in one kernel.

The features of a key/value head are split among CTAs. Each reads its rows of the state once, accumulates φ(q) S and
φ(q) Z for every query head that reads this state, and, where the state is to be updated, writes γ S + φ(k) vᵀ on the
way. The CTAs of a head exchange their partial sums through global memory: the last one to finish adds them up in a
fixed order, adds the token itself by its score, and divides. Memory traffic is the state: read once, and written at
most once.

With a window of recent tokens (`window_step`), further CTAs score its keys, and the state is only read: in 16 bits
where there is such a copy of it.

Features are products of entries of a vector, which are looked up: a CTA writes its rotated vectors to global memory and
reads their entries back through the L1 cache, so that the loop needs no barriers.

`sympow.kernels.decode.reference` holds the plain PyTorch reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.errors import ArgumentError
from sympow.kernels.common import EPSILON, even_power, or_one, power_of_two_scale
from sympow.kernels.launch import ceil_div, launch
from sympow.kernels.rotary import TWO_PI, cos_sin

# log γ^(1/p) of a closed gate: finite, so that differences of sums are defined, as in `sympow.ops.numerics`.
CLOSED_GATE_ROOT = tl.constexpr(-1000.0)
# As EPSILON, for a 16-bit copy, whose numbers are off by 2^-12 of themselves in the mean. In a sum over features the
# errors partly cancel: it is off by about 2^-12 times the root of the sum of squares, which is some tenth of the sum of
# magnitudes.
COPY_EPSILON = tl.constexpr(2.0**-16)
# Elements of the state that a CTA loads at once, and as many partial sums that it keeps for each query head; and CTAs
# over all heads: just as many as an H200 runs at once, since a few more cost a tenth. Both were measured.
TILE = 2048
PROGRAMS = 576
# Where wide rows are written too, smaller tiles let more CTAs run at once.
WIDE_UPDATE = 64
WIDE_UPDATE_TILE = 1024
WIDE_UPDATE_PROGRAMS = 768
# Where the state is only read: a thread loads 16 bytes at once, and several tiles ahead, so that enough bytes are on
# their way; partial sums take few registers in such small tiles. The first are numbers of a tile in 16 bits.
READ_TILE = 1024
READ_STAGES = 4
# CTAs for the state over all heads: as many as run at once; fewer for few heads, which exchange less then; and where
# several wide query heads read a state, which takes more registers.
READ_PROGRAMS = 576
READ_PROGRAMS_OF_FEW = 384
FEW_SEQUENCES = 64
WIDE_GROUP = 256
WIDE_GROUP_PROGRAMS = 352
WARPS = 4
# Features of a query that a CTA which does not update the state computes at once.
MOST_FEATURES = 512
# Partial sums that the last CTA of a head adds up at once: how many CTAs', at least, and how many numbers, at most.
BLOCK_SPLITS = 8
BLOCK_SUMS = 2048


# Arguments of the kernels -------------------------------------------------------------------------------------------
# Triton passes a NamedTuple to a kernel as one argument, whose fields are pointers and integers there. A field is None
# where the corresponding feature is off; the kernel's constexpr flags say so, too.


class Token(NamedTuple):
    """The token at hand.

    Attributes:
        q, k, v: (b, h, d), (b, h_kv, d), (b, h_kv, e), last axis contiguous.
        log_gamma: (b, h_kv) contiguous, or None.
        beta: (b, h_kv) or (b, h_kv, d/2) contiguous, or None.
        theta: (d/2,) contiguous, or None for no rotation.
        phase: μ before the token, (b, h_kv, d/2) float64 contiguous; None without rotation.
    """

    q: Any
    k: Any
    v: Any
    log_gamma: Any
    beta: Any
    theta: Any
    phase: Any


class Strides(NamedTuple):
    """Strides of q, k and v over sequences and heads."""

    q_batch: Any
    q_head: Any
    k_batch: Any
    k_head: Any
    v_batch: Any
    v_head: Any

    @classmethod
    def of(cls, token: Token) -> Strides:
        return cls(*token.q.stride()[:2], *token.k.stride()[:2], *token.v.stride()[:2])


class StateArguments(NamedTuple):
    """A state and its features: kv (b, h_kv, D, e), normalizer (b, h_kv, D); which entries each feature multiplies, two
    int16 in an int32, (D, p/2); √ of the features' multinomial coefficients, (D,); and, where kv is a 16-bit copy, what
    each of its rows has to be multiplied with, (b, h_kv, D), else None."""

    kv: Any = None
    normalizer: Any = None
    pairs: Any = None
    feature_weights: Any = None
    scale: Any = None


class RecentTokens(NamedTuple):
    """Tokens not yet folded into the state, or the cache of softmax attention.

    `window_step` and `softmax_step` have the shapes. (In a kernel, `values` is a list that every tuple has, so that no
    field can have this name.)

    Attributes:
        k, v: rotated keys, and values.
        decay: running sums of log γ^(1/p), or of log γ for softmax.
        count: how many tokens there are, (b, h_kv) int32.
    """

    k: Any = None
    v: Any = None
    decay: Any = None
    count: Any = None


class Exchange(NamedTuple):
    """Global memory through which the CTAs of a head exchange results: how many have finished, (b, h_kv) int32; their
    rotated vectors; partial numerators; partial denominators with a second number each; and the features of queries."""

    arrivals: Any
    vectors: Any
    partial: Any
    denominators: Any
    features: Any = None


class Outputs(NamedTuple):
    """y (b, h, e), and phase, kv and normalizer after the token; None where they do not change or change in place."""

    y: Any
    phase: Any = None
    kv: Any = None
    normalizer: Any = None


class Sizes(NamedTuple):
    """h_kv, D, d, e and the capacity of the window."""

    heads: int
    features: int
    dim: int
    value_dim: int
    capacity: int


@dataclass(frozen=True)
class Splits:
    """How the work on one head is split among CTAs.

    Attributes:
        rows: features that a CTA loads at once.
        rows_per_split: features of one CTA.
        state_splits, window_splits: CTAs for the state and for the window's keys.
        keys_per_split: keys of one CTA.
    """

    rows: int
    rows_per_split: int
    state_splits: int
    window_splits: int = 0
    keys_per_split: int = 0

    @property
    def count(self) -> int:
        return self.state_splits + self.window_splits


class SplitArguments(NamedTuple):
    """The fields of `Splits` that a kernel reads at run time."""

    count: int
    window_splits: int
    keys_per_split: int
    rows_per_split: int


# The kernel ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_kv(kv_ptr, rows, valid, columns, inside, value_dim):
    """Rows of a state. They are evicted first: what the caches hold already is more likely to be read again."""
    return tl.load(
        kv_ptr + rows[:, None] * value_dim + columns[None, :], mask=valid[:, None] & inside[None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip


@triton.jit
def _load_tiles(
    kv_ptr, first_row, last_row, columns, inside, value_dim, ROWS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The first STAGES tiles of ROWS rows."""
    tiles = ()
    for stage in tl.static_range(STAGES):
        rows = first_row + stage * ROWS + tl.arange(0, ROWS)
        tiles = tiles + (_load_kv(kv_ptr, rows, rows < last_row, columns, inside, value_dim),)
    return tiles


@triton.jit
def _load_rows(normalizer_ptr, state, rows, valid, POWER: tl.constexpr):
    """Entries of a normalizer, of the features' weights, and of the entries that they multiply."""
    normalizer = tl.load(normalizer_ptr + rows, mask=valid, other=0.0)
    feature_weights = tl.load(state.feature_weights + rows, mask=valid, other=0.0)
    entries = ()
    for pair in tl.static_range(POWER // 2):
        entries = entries + (tl.load(state.pairs + rows * (POWER // 2) + pair, mask=valid, other=0),)
    return normalizer, feature_weights, entries


@triton.jit
def _features(vector_ptr, feature_weights, entries, POWER: tl.constexpr):
    """φ at some rows of the feature list: products of POWER entries of a float32 vector in memory, times weights.

    `entries`: POWER / 2 tensors of indices, two in each int32.
    """
    product = feature_weights
    for pair in tl.static_range(POWER // 2):
        product = product * tl.load(vector_ptr + (entries[pair] & 0xFFFF)) * tl.load(vector_ptr + (entries[pair] >> 16))
    return product


@triton.jit
def _write_features(
    phi_ptr, vectors, normalizer_ptr, scale_ptr, state, first_row, last_row, rows_per_split,
    GROUP: tl.constexpr, POWER: tl.constexpr, DIM: tl.constexpr, COPY: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Writes φ(q) at some rows for every query head, times the scales of a 16-bit copy; returns partial sums of φ(q) Z
    and of |φ(q) Z|."""
    weights = (tl.zeros((FEATURES,), tl.float32),) * GROUP
    magnitudes = (tl.zeros((FEATURES,), tl.float32),) * GROUP
    for start in tl.range(first_row, last_row, FEATURES):
        rows = start + tl.arange(0, FEATURES)
        valid = rows < last_row
        normalizer, feature_weights, factors = _load_rows(normalizer_ptr, state, rows, valid, POWER)
        if COPY:
            scale = tl.load(scale_ptr + rows, mask=valid, other=0.0)
        next_weights = ()
        next_magnitudes = ()
        for member in tl.static_range(GROUP):
            phi_query = _features(vectors + (member + 1) * DIM, feature_weights, factors, POWER)
            next_weights = next_weights + (weights[member] + phi_query * normalizer,)
            next_magnitudes = next_magnitudes + (magnitudes[member] + tl.abs(phi_query * normalizer),)
            if COPY:
                phi_query *= scale
            tl.store(phi_ptr + member * rows_per_split + (rows - first_row), phi_query, mask=valid)
        weights = next_weights
        magnitudes = next_magnitudes
    return weights, magnitudes


@triton.jit
def _load_features(phi_ptr, rows, last_row, rows_per_split, GROUP: tl.constexpr):
    """φ(q) at some rows, for every query head."""
    phi = ()
    for member in tl.static_range(GROUP):
        phi = phi + (tl.load(phi_ptr + member * rows_per_split + rows, mask=rows < last_row, other=0.0),)
    return phi


@triton.jit
def phase_after(token, sequence, pairs, offsets, known, SCALED: tl.constexpr, PER_PAIR: tl.constexpr):
    """μ + β θ, the phase of the token at hand, in revolutions: float64. `offsets`: of this head's pairs in memory."""
    revolutions = tl.load(token.theta + pairs, mask=known, other=0.0).to(tl.float64) * (1 / TWO_PI)
    if SCALED:
        if PER_PAIR:
            revolutions *= tl.load(token.beta + offsets, mask=known, other=0.0).to(tl.float64)
        else:
            revolutions *= tl.load(token.beta + sequence).to(tl.float64)
    return revolutions + tl.load(token.phase + offsets, mask=known, other=0.0) * (1 / TWO_PI)


@triton.jit
def load_rotated(pointer, cos, sin, mask, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """A vector of DIM entries, rotated by the phase: float32."""
    x = tl.load(pointer + tl.arange(0, DIM), mask=mask, other=0.0).to(tl.float32)
    if ROTATED:
        even, odd = tl.split(tl.reshape(x, (DIM // 2, 2)))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (DIM,))
    return x


@triton.jit
def step_kernel(
    token, state, window, exchange, out, sizes, splits, strides,
    GROUP: tl.constexpr, POWER: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
    ROTATED: tl.constexpr, SCALED: tl.constexpr, PER_PAIR: tl.constexpr, UPDATE: tl.constexpr, WINDOW: tl.constexpr,
    STATE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, COPY: tl.constexpr,
    STAGES: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """CTA (sequence, split): a tile of the window's keys for the first `window_splits`, then some of the state's rows.

    The arguments are the NamedTuples above. UPDATE: write the state after the token. WINDOW: append the token to the
    window's keys instead. COPY: the state is a 16-bit copy. STAGES: tiles of ROWS rows that are loaded ahead.
    FEATURES: of a query that are computed at once.
    """
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = sequence // sizes.heads, sequence % sizes.heads
    entries, columns = tl.arange(0, DIM), tl.arange(0, COLUMNS)
    inside = columns < sizes.value_dim
    # The first rows of the state are loaded while queries and keys are rotated.
    first_row = (split - splits.window_splits) * splits.rows_per_split
    last_row = tl.minimum(first_row + splits.rows_per_split, sizes.features)
    rows = first_row + tl.arange(0, ROWS)
    if STATE:
        kv_ptr = state.kv + sequence * sizes.features * sizes.value_dim
        normalizer_ptr = state.normalizer + sequence * sizes.features
        # CTAs of the window have no rows: theirs would be before the first.
        stop = tl.where(first_row >= 0, last_row, first_row)
        ahead = _load_tiles(kv_ptr, first_row, stop, columns, inside, sizes.value_dim, ROWS, STAGES)
        if UPDATE:
            rows_ahead = _load_rows(normalizer_ptr, state, rows, rows < last_row, POWER)

    pairs = tl.arange(0, DIM // 2)
    known = pairs < sizes.dim // 2
    pair_offsets = sequence * (sizes.dim // 2) + pairs
    cos, sin = 1.0, 0.0
    if ROTATED:
        revolutions = phase_after(token, sequence, pairs, pair_offsets, known, SCALED, PER_PAIR)
        cos, sin = cos_sin(revolutions)

    # The running sum of log γ^(1/p) since the last fold, this token's included.
    total = tl.full((), 0.0, tl.float64)
    count = 0
    if WINDOW:
        count = tl.load(window.count + sequence)
        total += tl.load(window.decay + sequence * sizes.capacity + count - 1, mask=count > 0, other=0.0)
    if GATED:
        total += tl.maximum(tl.load(token.log_gamma + sequence).to(tl.float64) * (1 / POWER), CLOSED_GATE_ROOT)
    gamma = tl.exp((total * POWER).to(tl.float32))

    vectors = exchange.vectors + (sequence * splits.count + split) * ((GROUP + 1) * DIM)
    key = load_rotated(
        token.k + batch * strides.k_batch + head * strides.k_head, cos, sin, entries < sizes.dim, DIM, ROTATED
    )
    value = tl.load(
        token.v + batch * strides.v_batch + head * strides.v_head + columns, mask=inside, other=0.0
    ).to(tl.float32)  # fmt: skip
    tl.store(vectors + entries, key)
    queries = ()
    for member in tl.static_range(GROUP):
        source = token.q + batch * strides.q_batch + (head * GROUP + member) * strides.q_head
        query = load_rotated(source, cos, sin, entries < sizes.dim, DIM, ROTATED)
        query = query * power_of_two_scale(query[None, :])
        tl.store(vectors + (member + 1) * DIM + entries, query)
        queries = queries + (query,)
    tl.debug_barrier()  # other threads look up what these threads wrote

    mine = (sequence * splits.count + split) * GROUP
    if WINDOW and split < splits.window_splits:
        first = split * splits.keys_per_split
        stop = tl.minimum(first + splits.keys_per_split, count)
        recent = (tl.zeros((KEYS, COLUMNS), tl.float32),) * GROUP
        scores = (tl.zeros((KEYS,), tl.float32),) * GROUP
        for start in tl.range(first, stop, KEYS):
            positions = start + tl.arange(0, KEYS)
            seen = positions < stop
            places = sequence * sizes.capacity + positions
            past_keys = tl.load(
                window.k + (sequence * sizes.dim + entries)[None, :] * sizes.capacity + positions[:, None],
                mask=seen[:, None] & (entries < sizes.dim)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            past_values = tl.load(window.v + places[:, None] * sizes.value_dim + columns[None, :],
                                  mask=seen[:, None] & inside[None, :], other=0.0).to(tl.float32)  # fmt: skip
            since = total - tl.load(window.decay + places, mask=seen, other=0.0)
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
            tl.store(exchange.partial + (mine + member) * COLUMNS + columns, tl.sum(recent[member], axis=0))
            tl.store(exchange.denominators + (mine + member) * 2, tl.sum(scores[member], axis=0))
        if (count >= first) & (count < tl.minimum(first + splits.keys_per_split, sizes.capacity)):
            place = sequence * sizes.capacity + count
            target = window.k + (sequence * sizes.dim + entries) * sizes.capacity + count
            tl.store(target, key.to(window.k.dtype.element_ty), mask=entries < sizes.dim)
            tl.store(
                window.v + place * sizes.value_dim + columns, value.to(window.v.dtype.element_ty), mask=inside
            )  # fmt: skip
            tl.store(window.decay + place, total)
    elif STATE:
        accs = (tl.zeros((ROWS, COLUMNS), tl.float32),) * GROUP
        if UPDATE:
            weights = (tl.zeros((ROWS,), tl.float32),) * GROUP
            magnitudes = (tl.zeros((ROWS,), tl.float32),) * GROUP
            for start in tl.range(first_row, last_row, ROWS):
                kv = ahead[0]
                normalizer, feature_weights, factors = rows_ahead
                rows = start + ROWS + tl.arange(0, ROWS)
                ahead = (_load_kv(kv_ptr, rows, rows < last_row, columns, inside, sizes.value_dim),)
                rows_ahead = _load_rows(normalizer_ptr, state, rows, rows < last_row, POWER)
                next_accs = ()
                next_weights = ()
                next_magnitudes = ()
                for member in tl.static_range(GROUP):
                    phi_query = _features(vectors + (member + 1) * DIM, feature_weights, factors, POWER)
                    next_accs = next_accs + (accs[member] + phi_query[:, None] * kv,)
                    next_weights = next_weights + (weights[member] + phi_query * normalizer,)
                    next_magnitudes = next_magnitudes + (magnitudes[member] + tl.abs(phi_query * normalizer),)
                accs = next_accs
                weights = next_weights
                magnitudes = next_magnitudes
                rows = start + tl.arange(0, ROWS)
                valid = rows < last_row
                phi_key = _features(vectors, feature_weights, factors, POWER)
                tl.store(
                    out.kv + (sequence * sizes.features + rows)[:, None] * sizes.value_dim + columns[None, :],
                    kv * gamma + phi_key[:, None] * value[None, :], mask=valid[:, None] & inside[None, :],
                    eviction_policy="evict_first",
                )  # fmt: skip
                target = out.normalizer + sequence * sizes.features + rows
                tl.store(target, normalizer * gamma + phi_key, mask=valid)
        else:
            # φ(q) of all rows first, each number computed once: the loop over the state then has little else to load.
            phi_ptr = exchange.features + mine * splits.rows_per_split
            scale_ptr = normalizer_ptr
            if COPY:
                scale_ptr = state.scale + sequence * sizes.features
            weights, magnitudes = _write_features(
                phi_ptr, vectors, normalizer_ptr, scale_ptr, state, first_row, last_row, splits.rows_per_split,
                GROUP, POWER, DIM, COPY, FEATURES,
            )  # fmt: skip
            tl.debug_barrier()  # other threads read what these threads wrote
            phi_ptr -= first_row
            phi_ahead = ()
            for stage in tl.static_range(STAGES):
                rows = first_row + stage * ROWS + tl.arange(0, ROWS)
                phi_ahead = phi_ahead + (_load_features(phi_ptr, rows, last_row, splits.rows_per_split, GROUP),)
            for start in tl.range(first_row, last_row, ROWS * STAGES):
                next_ahead = ()
                next_phi = ()
                for stage in tl.static_range(STAGES):
                    kv = ahead[stage].to(tl.float32)
                    rows = start + (stage + STAGES) * ROWS + tl.arange(0, ROWS)
                    next_ahead = next_ahead + (
                        _load_kv(kv_ptr, rows, rows < last_row, columns, inside, sizes.value_dim),
                    )
                    next_phi = next_phi + (_load_features(phi_ptr, rows, last_row, splits.rows_per_split, GROUP),)
                    next_accs = ()
                    for member in tl.static_range(GROUP):
                        next_accs = next_accs + (accs[member] + phi_ahead[stage][member][:, None] * kv,)
                    accs = next_accs
                ahead = next_ahead
                phi_ahead = next_phi
        for member in tl.static_range(GROUP):
            tl.store(exchange.partial + (mine + member) * COLUMNS + columns, tl.sum(accs[member], axis=0))
            tl.store(exchange.denominators + (mine + member) * 2, tl.sum(weights[member], axis=0))
            tl.store(exchange.denominators + (mine + member) * 2 + 1, tl.sum(magnitudes[member], axis=0))

    tl.debug_barrier()  # all threads have written their sums before the CTA counts as finished
    arrived = tl.atomic_add(exchange.arrivals + sequence, 1, sem="acq_rel")
    if arrived == splits.count - 1:
        tl.store(exchange.arrivals + sequence, 0)
        if WINDOW:
            tl.store(window.count + sequence, tl.minimum(count + 1, sizes.capacity))
        if ROTATED:
            tl.store(out.phase + pair_offsets, (revolutions - tl.floor(revolutions + 0.5)) * TWO_PI, mask=known)
        for member in tl.static_range(GROUP):
            state_sums = tl.zeros((SPLITS, COLUMNS), tl.float32)
            recent_sums = tl.zeros((SPLITS, COLUMNS), tl.float32)
            state_weights = tl.zeros((SPLITS,), tl.float32)
            recent_weights = tl.zeros((SPLITS,), tl.float32)
            state_magnitudes = tl.zeros((SPLITS,), tl.float32)
            for start in tl.range(0, splits.count, SPLITS):
                index = start + tl.arange(0, SPLITS)
                of_state, of_window = (
                    (index >= splits.window_splits) & (index < splits.count),
                    index < splits.window_splits,
                )
                found = (sequence * splits.count + index) * GROUP + member
                pointers = exchange.partial + found[:, None] * COLUMNS + columns[None, :]
                # Loads bypass the L1 cache, which does not see what other multiprocessors wrote.
                if STATE:
                    state_sums += tl.load(pointers, mask=of_state[:, None], other=0.0, cache_modifier=".cg")
                    state_weights += tl.load(
                        exchange.denominators + found * 2, mask=of_state, other=0.0, cache_modifier=".cg"
                    )
                    state_magnitudes += tl.load(
                        exchange.denominators + found * 2 + 1, mask=of_state, other=0.0, cache_modifier=".cg"
                    )
                if WINDOW:
                    recent_sums += tl.load(pointers, mask=of_window[:, None], other=0.0, cache_modifier=".cg")
                    recent_weights += tl.load(
                        exchange.denominators + found * 2, mask=of_window, other=0.0, cache_modifier=".cg"
                    )
            # The state counts unless φ(q) Z is indistinguishable from rounding; keys, this token's included, by scores.
            state_share = tl.sum(state_weights, axis=0)
            rounding = state_share < tl.sum(state_magnitudes, axis=0) * (COPY_EPSILON if COPY else EPSILON)
            score = even_power(tl.sum(queries[member] * key, axis=0), POWER)
            denominator = tl.where(rounding, 0.0, state_share * gamma) + tl.sum(recent_weights, axis=0) + score
            numerator = tl.where(rounding, 0.0, tl.sum(state_sums, axis=0) * gamma) + tl.sum(recent_sums, axis=0)
            y = tl.where(denominator == 0, 0.0, (numerator + score * value) / or_one(denominator))
            if WINDOW:
                y = tl.where(count < sizes.capacity, y, float("nan"))  # the window is full: make the error visible
            target = out.y + (sequence * GROUP + member) * sizes.value_dim + columns
            tl.store(target, y.to(out.y.dtype.element_ty), mask=inside)


# Launchers ----------------------------------------------------------------------------------------------------------


def split_state(
    sequences: int, feature_count: int, value_dim: int, group: int, *, tile: int = TILE, programs: int = PROGRAMS
) -> Splits:
    """The rows of a state split about equally, so that all heads together take about `programs` CTAs."""
    # Every query head of a group has its own partial sums in registers.
    rows = max(8, tile // triton.next_power_of_2(value_dim) // max(1, triton.next_power_of_2(group) // 2))
    tiles = ceil_div(feature_count, rows)
    wanted = min(tiles, max(1, programs // sequences))
    rows_per_split = rows * ceil_div(tiles, wanted)
    return Splits(rows, rows_per_split, ceil_div(feature_count, rows_per_split))


def vector_block(key_dim: int) -> int:
    """The head dimension of queries and keys rounded up to a power of two, at least 2."""
    return max(2, triton.next_power_of_2(key_dim))


def workspace_sizes(
    sequences: int, splits: Splits, group: int, key_dim: int, value_dim: int, *, update: bool
) -> list[int]:
    """How many float32 numbers the CTAs of a step exchange: each field of `Exchange` but the first."""
    ctas = sequences * splits.count
    features = 0 if update else splits.rows_per_split
    columns = triton.next_power_of_2(value_dim)
    return [ctas * (group + 1) * vector_block(key_dim), ctas * group * columns, ctas * group * 2,
            ctas * group * features]  # fmt: skip


def launch_step(
    token: Token,
    state: StateArguments,
    window: RecentTokens,
    out: Outputs,
    arrivals: Tensor,
    workspace: Tensor,
    splits: Splits,
    power: int,
    *,
    block_keys: int = 32,
    warps: int = WARPS,
    stages: int = 1,
) -> Tensor:
    """y (b, h, e) of one token; `decode_step` and `window_step` explain the arguments."""
    (batch, heads, dim), value_dim = token.k.shape, token.v.shape[-1]
    group, features = token.q.shape[1] // heads, 0 if state.feature_weights is None else state.feature_weights.shape[0]
    block_dim, columns = vector_block(dim), triton.next_power_of_2(value_dim)
    if state.kv is not None and features * value_dim >= 2**31:
        raise ArgumentError("kv", f"holds {features * value_dim} numbers a head; the kernels take fewer than 2³¹")
    update = out.kv is not None
    lengths = workspace_sizes(batch * heads, splits, group, dim, value_dim, update=update)
    exchange = Exchange(arrivals, *workspace[: sum(lengths)].split(lengths))
    if state.pairs is not None:
        state = state._replace(pairs=state.pairs.view(torch.int32))
    capacity = 0 if window.k is None else window.k.shape[-1]
    launch(
        step_kernel, (batch * heads, splits.count),
        token, state, window, exchange, out, Sizes(heads, features, dim, value_dim, capacity),
        SplitArguments(splits.count, splits.window_splits, splits.keys_per_split, splits.rows_per_split),
        Strides.of(token),
        GROUP=group, POWER=power, DIM=block_dim, COLUMNS=columns, GATED=token.log_gamma is not None,
        ROTATED=token.theta is not None, SCALED=token.beta is not None,
        PER_PAIR=token.beta is not None and token.beta.ndim == 3, UPDATE=update,
        WINDOW=window.k is not None, STATE=state.kv is not None, ROWS=splits.rows, KEYS=block_keys,
        SPLITS=max(BLOCK_SPLITS, min(BLOCK_SUMS // columns, triton.next_power_of_2(splits.count))),
        COPY=state.scale is not None, STAGES=stages,
        FEATURES=min(MOST_FEATURES, triton.next_power_of_2(splits.rows_per_split)), num_warps=warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out.y


def empty_output(token: Token) -> Tensor:
    """y (b, h, e), uninitialized."""
    return token.v.new_empty(*token.q.shape[:2], token.v.shape[-1])


def decode_step(
    token: Token,
    state: StateArguments,
    *,
    kv_out: Tensor | None = None,
    tile: int | None = None,
    programs: int | None = None,
    warps: int = WARPS,
) -> Outputs:
    """y (b, h, e), and the state after one token.

    Args:
        state: kv and normalizer float32 contiguous, `pairs` as the feature indices (D, p) int16, weight (D,) float32.
        kv_out: where to write the new kv; can be kv itself. None: a new tensor.
        tile, programs, warps: how the state is split; None: as measured best.
    """
    batch, heads, feature_count, value_dim = state.kv.shape
    group = token.q.shape[1] // heads
    wide = value_dim >= WIDE_UPDATE
    tile = tile or (WIDE_UPDATE_TILE if wide else TILE)
    programs = programs or (WIDE_UPDATE_PROGRAMS if wide else PROGRAMS)
    splits = split_state(batch * heads, feature_count, value_dim, group, tile=tile, programs=programs)
    out = Outputs(
        empty_output(token),
        None if token.phase is None else torch.empty_like(token.phase),
        torch.empty_like(state.kv) if kv_out is None else kv_out,
        torch.empty_like(state.normalizer),
    )
    arrivals = torch.zeros(batch * heads, dtype=torch.int32, device=state.kv.device)
    sizes = workspace_sizes(batch * heads, splits, group, token.k.shape[-1], value_dim, update=True)
    workspace = state.kv.new_empty(sum(sizes))
    launch_step(token, state, RecentTokens(), out, arrivals, workspace, splits, state.pairs.shape[1], warps=warps)
    return out
