"""The three products of every form in plain PyTorch: attend to keys, query a state, update a state.

All work on head-major tensors, h_kv = n key heads with g query heads each:
    q (b, n, g, t, d)    k (b, n, t, d)    v (b, n, t, e)    kv (b, n, D, e)    normalizer (b, n, D)
and on running sums of logarithms of decays, `decay` (b, n, t, 1 or d/2) in float64, from `sympow.ops.inputs.prepare`.
What attends returns `Sums`, numerator and denominator apart, so that contributions from several blocks add before the
one division.

Weights are p-th powers of scores, and those of p = 6 and 8 leave the range of float32 where all scores of a row are
small: 1e-5 to the eighth is 1e-40. The output does not change when a query is scaled, so each block of a row then takes
its weights in a unit of its own, a power of two near its largest weight, and `Sums.plus` brings two blocks to one unit.
To autograd units are constants, and the gradient is still exact. Lower powers need no units.

No tensor of size t × t or t × D is kept: scores and features are computed in blocks of at most `BLOCK_ELEMENTS`, and
where gradients are needed each block is recomputed in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from sympow.ops.compilation import is_known, runs_now_on_cpu, slices
from sympow.ops.numerics import apply_decay, decay_to_meet, feature_decay, largest_entry, power_of_two
from sympow.ops.symmetric import even_power, symmetric_power_rows
from sympow.ops.torch import quadratic
from sympow.settings import symmetric_dim

# Scores or features of one block, over batch and heads. On a GPU 16 Mi elements, 64 MiB in float32, are enough for
# products to take much longer than their launches, and few beside any state that is worth chunking for.
BLOCK_ELEMENTS = 1 << 24
# On a CPU blocks stay in the caches. Those of features have few rows in any case, and products of fewer are slow.
CACHED_SCORES_PER_THREAD = 1 << 18
CACHED_FEATURES_PER_THREAD = 1 << 20
# Rows of a tile of scores. The minimum applies even where a block is then larger than BLOCK_ELEMENTS.
MIN_ROWS = 16
MAX_ROWS = 256
# Rows of a diagonal tile, whose decays are computed element by element; the second where each pair of entries has its
# own gate.
DIAGONAL_ROWS = 64
PAIRWISE_ROWS = 8

# Weights of higher powers are taken in units of their rows.
LARGEST_POWER_WITHOUT_UNITS = 4
# The exponent of the unit of a row without any weight: below every other one, also after several products by p.
WEIGHTLESS = -(2**24)

# The members of `Sums` as a block that is recomputed returns them.
Block = tuple[Tensor, ...]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sums:
    """Σ_j B_ij V_j and Σ_j B_ij over some of the tokens before each query.

    Attributes:
        numerator: (b, n, g, t, e), in units of 2^exponent.
        denominator: (b, n, g, t), likewise.
        exponent: (b, n, g, t) int32; None: zero.
    """

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor | None = None

    def plus(self, other: Sums) -> Sums:
        """The sums over the tokens of both, in the larger of both units."""
        if self.exponent is None and other.exponent is None:
            return Sums(self.numerator + other.numerator, self.denominator + other.denominator)
        own, its = (
            torch.zeros_like(x.denominator, dtype=torch.int32) if x.exponent is None else x.exponent
            for x in (self, other)
        )
        exponent = torch.maximum(own, its)
        ours, theirs = self._times(own - exponent), other._times(its - exponent)
        return Sums(ours.numerator + theirs.numerator, ours.denominator + theirs.denominator, exponent)

    def _times(self, exponent: Tensor) -> Sums:
        """The numbers of both sums times 2^exponent."""
        factor = power_of_two(exponent, self.denominator.dtype)
        return Sums(self.numerator * factor.unsqueeze(-1), self.denominator * factor)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sums:
        """The sums with a function of each tensor, whose axes it treats alike up to the last common one."""
        exponent = None if self.exponent is None else function(self.exponent)
        return Sums(function(self.numerator), function(self.denominator), exponent)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
    """Σ_{j≤i} B_ij V_j and Σ_{j≤i} B_ij with B_ij = b_ij (q_i · k_j)^p (paper §3.1)."""
    by_halves = decay.shape[-1] > 1 or runs_now_on_cpu(q)
    return (_causal_by_halves if by_halves else _causal_in_tiles)(q, k, v, decay, power)


def attend_to_past(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, past_decay: Tensor, power: int) -> Sums:
    """Σ_j B_ij V_j and Σ_j B_ij over keys that all lie before the queries, in tiles of rows.

    Args:
        q: (b, n, g, t, d).
        k, v: (b, n, s, ·).
        decay, past_decay: running sums at the queries (b, n, t, ·) and at the keys (b, n, s, ·).
    """
    rows, columns = _tile(q, k)
    keys = list(zip(*(_split(x, columns, dim=2) for x in (k, v, past_decay)), strict=True))
    sums = []
    for queries, at in zip(_split(q, rows, dim=3), _split(decay, rows, dim=2), strict=True):
        tiles = [_past_tile(queries, k, v, at, past, power) for k, v, past in keys]
        sums.append(reduce(Sums.plus, tiles))
    return joined(sums, dim=3)


def attend_to_self(q: Tensor, k: Tensor, v: Tensor, power: int) -> Sums:
    """B_ii V_i and B_ii of one token: q (b, n, g, 1, d), k (b, n, 1, d), v (b, n, 1, e)."""
    weights, *exponent = _weigh((q * k.unsqueeze(2)).sum(-1, keepdim=True), power)  # (b, n, g, 1, 1)
    return Sums(weights * v.unsqueeze(2), weights.squeeze(-1), *exponent)


def query_state(q: Tensor, decay: Tensor, kv: Tensor, normalizer: Tensor, power: int) -> Sums:
    """φ(q_i) S and φ(q_i) Z for a state that has since decayed by `decay` (paper §2.1)."""
    q = apply_decay(q, decay.unsqueeze(2))
    if quadratic.supports(q, power):
        return _query_quadratic(q, kv, normalizer)
    block = _query_block if power <= LARGEST_POWER_WITHOUT_UNITS else _query_block_in_units
    parts = [
        Sums(*recompute(block, q[:, :, :, rows], kv, normalizer, power))
        for rows in _feature_blocks(q, kv.shape[-1], power)
    ]
    return joined(parts, dim=3)


def update_state(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    kv: Tensor | None,
    normalizer: Tensor | None,
    power: int,
    *,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """S ← γ_1⋯γ_t S + Σ_j γ_{j+1}⋯γ_t φ(k_j) v_jᵀ, and Z likewise (paper eq. conformal_in_practice).

    Args:
        kv, normalizer: S and Z before these tokens; None: zero.
        in_place: whether to overwrite them; not where autograd needs them.
    """
    total = decay[:, :, -1:]
    k = apply_decay(k, total - decay)
    if kv is not None and normalizer is not None:
        feature = feature_decay(total.squeeze(2), power, kv.dtype)
        kv = multiply(kv, feature.unsqueeze(-1), in_place=in_place)
        normalizer = multiply(normalizer, feature, in_place=in_place)
    if quadratic.supports(k, power):
        return _update_quadratic(k, v, kv, normalizer, in_place=in_place)
    for rows in _feature_blocks(k.unsqueeze(2), v.shape[-1], power):
        added_kv, added_normalizer = recompute(_update_block, k[:, :, rows], v[:, :, rows], power)
        if kv is None or normalizer is None:
            kv, normalizer = added_kv, added_normalizer
        elif in_place:
            kv.add_(added_kv)
            normalizer.add_(added_normalizer)
        else:
            kv, normalizer = kv + added_kv, normalizer + added_normalizer
    assert kv is not None, "no rows to fold"
    assert normalizer is not None
    return kv, normalizer


def multiply(x: Tensor, factor: Tensor, *, in_place: bool) -> Tensor:
    return x.mul_(factor) if in_place else x * factor


def drop_rounding(numerator: Tensor, denominator: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Sets what a state returns to zero where it is rounding error alone.

    φ(q) Z is a sum of numbers of both signs. Where q is orthogonal to all keys it is zero up to a rounding error of
    ε Σ |φ(q)_i Z_i|, and a quotient of two rounding errors could have any size.

    Args:
        numerator: φ(q) S, (b, n, g, t, e).
        denominator: φ(q) Z, (b, n, g, t).
        magnitude: |φ(q)| |Z|, entry by entry, likewise.
    """
    rounding = denominator.detach() < torch.finfo(magnitude.dtype).eps * magnitude.detach()
    return numerator.masked_fill(rounding.unsqueeze(-1), 0.0), denominator.masked_fill(rounding, 0.0)


def _causal_in_tiles(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
    """One gate for all entries of a key: tiles of rows, each against itself and against all columns before it."""
    sums = []
    tile = _rows_in_a_block(q, k.shape[2])
    for rows in slices(k.shape[2], None if tile is None else min(MAX_ROWS, tile)):
        columns = slice(rows.start or 0)
        diagonal = (q[:, :, :, rows], k[:, :, rows], v[:, :, rows], decay[:, :, rows], power)
        tile_sums = Sums(*recompute(_diagonal_tile, *diagonal))
        if rows.start:
            past = (q[:, :, :, rows], k[:, :, columns], v[:, :, columns], decay[:, :, rows], decay[:, :, columns])
            tile_sums = tile_sums.plus(attend_to_past(*past, power))
        sums.append(tile_sums)
    return joined(sums, dim=3)


def _causal_by_halves(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
    """The later half of the rows attends to the earlier half, and so on within each half.

    Within a diagonal tile decays are computed element by element, and for each of d/2 pairs where each pair of entries
    has its own gate, so these tiles must be small, and there are many. All tiles of one size are batched as if they
    were heads, so that the number of calls grows with the logarithm of the length as long as blocks allow.
    """
    heads, length, pairs = q.shape[:2], q.shape[3], decay.shape[-1]
    most, diagonal = (DIAGONAL_ROWS, _diagonal_tile) if pairs == 1 else (PAIRWISE_ROWS, _pairwise_tile)
    tile, halvings = length, 0
    while tile > most:
        tile, halvings = -(-tile // 2), halvings + 1
    padding = (tile << halvings) - length  # less than one row a tile
    if padding:
        # A key of zeros has no score, and rows past the end are cut off. Their decay must not increase.
        q, k, v = (pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        decay = torch.cat([decay, decay[:, :, -1:].expand(-1, -1, padding, -1)], dim=2)
    # Time before query heads, so that tiles of all sizes are views of the same tensors, and autograd keeps only these.
    sequences = [x.flatten(0, 1).contiguous() for x in (q.transpose(2, 3), k, v, decay)]

    tiles = _side_by_side(sequences, tile)
    elements = q.shape[2] * tile * tile * pairs
    # Decays are float64 and count twice.
    sums = _over_heads(lambda *args: Sums(*recompute(diagonal, *args)), 2 * elements, *tiles, power=power)
    for size in (tile << level for level in range(halvings)):
        queries, keys, values, decays = _side_by_side(sequences, 2 * size)
        past = _over_heads(
            attend_to_past,
            q.shape[2] * size * size,
            *(queries[:, :, :, size:], keys[:, :, :size], values[:, :, :size]),
            *(decays[:, :, size:], decays[:, :, :size]),
            power=power,
        )
        earlier, later = sums.map(lambda x: x[:, ::2]), sums.map(lambda x: x[:, 1::2])
        sums = joined([earlier, later.plus(past)], dim=3)
    return sums.map(lambda x: x.squeeze(0).unflatten(0, heads)[:, :, :, :length])


def _side_by_side(sequences: list[Tensor], rows: int) -> list[Tensor]:
    """Splits (n, t, ...) into tiles, each as a head of its own: (1, n · t / rows, [g,] rows, ·)."""
    q, *others = (x.unflatten(1, (-1, rows)).flatten(0, 1).unsqueeze(0) for x in sequences)
    return [q.transpose(2, 3), *others]


def _over_heads(attend: Callable[..., Sums], elements: int, *tensors: Tensor, power: int) -> Sums:
    """`attend` for as many heads at a time as fit in one block, with `elements` each."""
    heads = max(1, _block_elements(tensors[0], CACHED_SCORES_PER_THREAD) // elements)
    groups = zip(*(x.split(heads, dim=1) for x in tensors), strict=True)
    return joined([attend(*group, power) for group in groups], dim=1)


def _past_tile(q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor, column_decay: Tensor, power: int) -> Sums:
    """A tile whose columns all precede its rows."""
    if quadratic.supports(q, power):
        return Sums(*quadratic.attend(q, k, v, row_decay, column_decay))
    return Sums(*recompute(_attend_in_units, q, k, v, row_decay, column_decay, power))


def _attend_in_units(q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor, column_decay: Tensor, power: int) -> Block:
    weights, *exponent = _weigh(_scores(*decay_to_meet(q, k, row_decay, column_decay)), power)
    return (*_weighted_sums(weights, v), *exponent)


def _diagonal_tile(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Block:
    """Rows against themselves, one gate for all entries."""
    scores = _scores(q, k) * _decays_within(decay, q.dtype).squeeze(-1).unsqueeze(2)
    return _causal_sums(scores, v, power)


def _pairwise_tile(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Block:
    """Rows against themselves, one gate for every pair of entries, so that a score is a sum of d/2 decayed products."""
    # Elementwise: as matrix products these would be many with an inner size of 2.
    q_pairs = q.unflatten(-1, (-1, 2)).movedim(-1, 0).contiguous().unsqueeze(5)
    k_pairs = k.unflatten(-1, (-1, 2)).movedim(-1, 0).contiguous().unsqueeze(3).unsqueeze(4)
    products = q_pairs[0] * k_pairs[0] + q_pairs[1] * k_pairs[1]  # (b, n, g, rows, columns, d/2)
    scores = (products * _decays_within(decay, q.dtype).unsqueeze(2)).sum(-1)
    return _causal_sums(scores, v, power)


def _decays_within(decay: Tensor, dtype: torch.dtype) -> Tensor:
    """From each column to each row, 0 where the column comes later: (b, n, rows, columns, 1 or d/2).

    The only place where decays are computed element by element.
    """
    future = _future(decay.shape[2], decay.device)
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).to(dtype)
    return between.masked_fill_(future.unsqueeze(2), float("-inf")).exp_()


def _future(rows: int, device: torch.device) -> Tensor:
    """Which columns of a tile come after a row: (rows, rows) bool."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)


def _causal_sums(scores: Tensor, v: Tensor, power: int) -> Block:
    """Weighted sums of a tile of rows against themselves, none of which depends on a later column.

    A weight of zero is not enough where a later key or value is not finite, since 0 · inf is NaN. So scores of later
    columns are overwritten, and values that are not finite are set to zero; rows from such a value on are NaN.
    """
    weights, *exponent = _weigh(scores.masked_fill_(_future(scores.shape[-1], scores.device), 0.0), power)
    if runs_now_on_cpu(v) and v.sum().isfinite():
        return (*_weighted_sums(weights, v), *exponent)  # all values are finite
    finite = v.isfinite()
    numerator, denominator = _weighted_sums(weights, v.masked_fill(~finite, 0.0))
    not_finite = ((~finite).cumsum(2) > 0).unsqueeze(2)  # (b, n, 1, rows, e)
    return (numerator.masked_fill(not_finite, float("nan")), denominator, *exponent)


def _weigh(scores: Tensor, power: int) -> Block:
    """The weights of rows of scores (..., t, s) and, for the higher powers, the exponents of their units (..., t)."""
    if power == 2 and not scores.requires_grad:
        return (scores.mul_(scores),)  # the scores are not needed again, and memory is not touched for the first time
    if power <= LARGEST_POWER_WITHOUT_UNITS:
        return (even_power(scores, power),)
    largest = largest_entry(scores.detach())
    # Numbers below it have lost digits, and their reciprocals overflow.
    weightless = largest < torch.finfo(scores.dtype).tiny
    exponent = _exponents(largest)
    factor = power_of_two(-exponent, scores.dtype).masked_fill(weightless, 0.0)
    return even_power(scores * factor.unsqueeze(-1), power), (power * exponent).masked_fill(weightless, WEIGHTLESS)


def _exponents(x: Tensor) -> Tensor:
    """The exponents of powers of two just above x, zero where x is not finite: int32."""
    return torch.frexp(torch.where(x.isfinite(), x, 1.0)).exponent


def _query_quadratic(q: Tensor, kv: Tensor, normalizer: Tensor) -> Sums:
    numerator = quadratic.contract(q.flatten(2, 3).flatten(0, 1), kv.flatten(0, 1))
    denominator, magnitude = quadratic.contract_normalizer(q, normalizer)
    return Sums(*drop_rounding(numerator.reshape(*q.shape[:4], -1), denominator, magnitude))


def _update_quadratic(
    k: Tensor, v: Tensor, kv: Tensor | None, normalizer: Tensor | None, *, in_place: bool
) -> tuple[Tensor, Tensor]:
    heads = k.shape[:2]
    k, v, added_normalizer = k.flatten(0, 1), v.flatten(0, 1), quadratic.expand_normalizer(k)
    if kv is None or normalizer is None:
        return quadratic.expand(k, v).unflatten(0, heads), added_normalizer
    if in_place:
        quadratic.expand_into(k, v, kv.view(-1, *kv.shape[2:]))
        return kv, normalizer.add_(added_normalizer)
    return kv + quadratic.expand(k, v).unflatten(0, heads), normalizer + added_normalizer


def _query_block(q: Tensor, kv: Tensor, normalizer: Tensor, power: int) -> Block:
    features = symmetric_power_rows(q.flatten(2, 3).mT, power)  # (b, n, D, g · t)
    numerator = features.mT @ kv
    denominator = (normalizer.unsqueeze(2) @ features).squeeze(2)
    with torch.no_grad():
        magnitude = (normalizer.abs().unsqueeze(2) @ features.abs()).squeeze(2)
    return drop_rounding(*(x.unflatten(2, q.shape[2:4]) for x in (numerator, denominator, magnitude)))


def _query_block_in_units(q: Tensor, kv: Tensor, normalizer: Tensor, power: int) -> Block:
    """As `_query_block` for the higher powers, with weights in units of their rows.

    The features of a query are made as large as their dtype allows, and then divided by the row's weight. A feature
    that is then still far above one meets next to nothing in the state. It is left out, since the gradient of the
    state would be as large, and a sum of such gradients leaves the range; a row that lives from it has no weight.
    """
    most, far_above = (900, 980) if q.dtype == torch.float64 else (104, 112)
    with torch.no_grad():
        held = _exponents(largest_entry(normalizer)).clamp(min=0)  # (b, n)
        length = (most - held).div(power, rounding_mode="floor") - math.ceil(math.log2(q.shape[-1]) / 2)
        entries = _exponents(largest_entry(q))  # (b, n, g, t)
        raised = (length[:, :, None, None] - entries).clamp(max=far_above)
    q = q * power_of_two(raised, q.dtype).unsqueeze(-1)
    features = symmetric_power_rows(q.flatten(2, 3).mT, power)  # (b, n, D, g · t)
    with torch.no_grad():
        weight = normalizer.unsqueeze(2) @ features  # (b, n, 1, g · t)
        magnitude = normalizer.abs().unsqueeze(2) @ features.abs()
        # As in `drop_rounding`.
        weightless = (weight < torch.finfo(q.dtype).eps * magnitude) | (weight < 2.0**-far_above)
        exponent = _exponents(weight)
        factor = power_of_two(-exponent, q.dtype).masked_fill(weightless, 0.0)
        alone = features.abs() * factor > 2.0**far_above
    features = features.masked_fill(alone, 0.0) * factor
    numerator = features.mT @ kv
    denominator = (normalizer.unsqueeze(2) @ features).squeeze(2)
    # At least 1/2, but where features were left out or the row has no weight. Such a row must not set the unit of a
    # sum with another one.
    weightless = denominator < 0.25
    numerator = numerator.masked_fill(weightless.unsqueeze(-1), 0.0)
    denominator = denominator.masked_fill(weightless, 0.0)
    exponent = (exponent.squeeze(2) - power * raised.flatten(2, 3)).masked_fill(weightless, WEIGHTLESS)
    numerator, denominator, exponent = (x.unflatten(2, q.shape[2:4]) for x in (numerator, denominator, exponent))
    return numerator, denominator, exponent


def _update_block(k: Tensor, v: Tensor, power: int) -> tuple[Tensor, Tensor]:
    features = symmetric_power_rows(k.mT, power)  # (b, n, D, t)
    return features @ v, features.sum(-1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q_i · k_j: (b, n, g, rows, columns)."""
    return _group_product(q, k.mT)


def _weighted_sums(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _group_product(weights, v), weights.sum(-1)


def _group_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """(b, n, g, t, x) times (b, n, x, y), the g query heads of a key head as one tall product: (b, n, g, t, y)."""
    if not is_known(rows.shape[3]):
        # With a symbolic length, torch cannot infer the strides of the flattened matrix and would specialize on one.
        return rows @ matrix.unsqueeze(2)
    return (rows.flatten(2, 3) @ matrix).unflatten(2, rows.shape[2:4])


def joined(sums: list[Sums], dim: int) -> Sums:
    """Sums of several rows or heads, one after the other along an axis."""
    if len(sums) == 1:
        return sums[0]
    exponents = [x.exponent for x in sums if x.exponent is not None]
    return Sums(
        torch.cat([x.numerator for x in sums], dim=dim),
        torch.cat([x.denominator for x in sums], dim=dim),
        torch.cat(exponents, dim=dim) if exponents else None,
    )


def _tile(q: Tensor, k: Tensor) -> tuple[int | None, int | None]:
    """Rows and columns of a tile of scores; None: all of them. On a CPU it stays in the caches."""
    if not runs_now_on_cpu(q):
        return _rows_in_a_block(q, k.shape[2]), None
    elements = _block_elements(q, CACHED_SCORES_PER_THREAD) // math.prod(q.shape[:3])
    if q.shape[3] * k.shape[2] <= elements:
        return None, None
    rows = max(MIN_ROWS, min(MAX_ROWS, q.shape[3], elements // MIN_ROWS))
    return rows, max(MIN_ROWS, elements // rows)


def _split(x: Tensor, size: int | None, dim: int) -> tuple[Tensor, ...]:
    """Parts of at most `size` along an axis. The gradient of a slice would be as large as the whole."""
    return (x,) if size is None else x.split(size, dim)


def _block_elements(x: Tensor, per_thread: int) -> int:
    """Elements of a block: on a CPU no more than its caches hold."""
    return min(BLOCK_ELEMENTS, per_thread * torch.get_num_threads()) if runs_now_on_cpu(x) else BLOCK_ELEMENTS


def _rows_in_a_block(q: Tensor, columns: int) -> int | None:
    """How many rows of scores with so many columns fit in one block, for q (b, n, g, t, d).

    None: any number, where batch or length is symbolic.
    """
    if not (is_known(q.shape[0]) and is_known(columns)):
        return None
    return max(
        MIN_ROWS, _block_elements(q, CACHED_SCORES_PER_THREAD) // max(1, q.shape[0] * q.shape[1] * q.shape[2] * columns)
    )


def _feature_blocks(x: Tensor, value_dim: int, power: int) -> list[slice]:
    """Slices of the time axis of x (b, n, g, t, d) whose features fit in one block, or are no larger than a state."""
    if not is_known(x.shape[0]):
        return slices(x.shape[3], None)
    per_row = x.shape[0] * x.shape[1] * x.shape[2] * symmetric_dim(x.shape[-1], power)
    rows = max(value_dim, _block_elements(x, CACHED_FEATURES_PER_THREAD) // max(1, per_row))
    return slices(x.shape[3], rows)


def recompute(block: Callable[..., Result], *args: Any) -> Result:
    """Runs a block; if gradients are needed, keeps only its inputs and recomputes it in the backward pass."""
    if torch.compiler.is_exporting():  # only a forward pass is exported
        return block(*args)
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
    return block(*args)
