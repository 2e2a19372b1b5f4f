"""The three products of every form in plain PyTorch: attend to keys, query a state, update a state.

All work on head-major tensors, h_kv = n key heads with g query heads each:
    q (b, n, g, t, d)    k (b, n, t, d)    v (b, n, t, e)    kv (b, n, D, e)    normalizer (b, n, D)
and on running sums of logarithms of decays, `decay` (b, n, t, 1 or d/2) in float64, from `sympow.ops.sequence.prepare`.
Each returns numerator (b, n, g, t, e) and denominator (b, n, g, t) apart, so that contributions from several blocks
add before the one division.

No tensor of size t × t or t × D is kept: scores and features are computed in blocks of at most `BLOCK_ELEMENTS`, and
where gradients are needed each block is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from sympow.ops.compilation import is_known, slices
from sympow.ops.numerics import apply_decay, feature_decay
from sympow.ops.symmetric import even_power, symmetric_power_rows
from sympow.settings import symmetric_dim

# Scores or features of one block, over batch and heads. 16 Mi elements are 64 MiB in float32: large enough that the
# products take much longer than their launches, and small beside any state that is worth chunking for.
BLOCK_ELEMENTS = 1 << 24
# Rows of a tile of scores. The minimum applies even where a block is then larger than BLOCK_ELEMENTS.
MIN_ROWS = 16
MAX_ROWS = 256
# Rows of a tile whose decays are computed element by element, where each pair of entries has its own gate.
PAIRWISE_ROWS = 8

Sums = tuple[Tensor, Tensor]
Result = TypeVar("Result")


def causal_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
    """Σ_{j≤i} B_ij V_j and Σ_{j≤i} B_ij with B_ij = b_ij (q_i · k_j)^p (paper §3.1)."""
    if decay.shape[-1] > 1:
        return _causal_by_halves(q, k, v, decay, power)
    return _causal_in_tiles(q, k, v, decay, power)


def attend_to_past(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, past_decay: Tensor, power: int) -> Sums:
    """Σ_j B_ij V_j and Σ_j B_ij over keys that all lie before the queries, in tiles of rows.

    Args:
        q: (b, n, g, t, d).
        k, v: (b, n, s, ·).
        decay, past_decay: running sums at the queries (b, n, t, ·) and at the keys (b, n, s, ·).
    """
    tiles = slices(q.shape[3], _rows_in_a_block(q, k.shape[2]))
    sums = [recompute(_past_tile, q[:, :, :, t], k, v, decay[:, :, t], past_decay, power) for t in tiles]
    return _joined(sums, dim=3)


def query_state(q: Tensor, decay: Tensor, kv: Tensor, normalizer: Tensor, power: int) -> Sums:
    """φ(q_i) S and φ(q_i) Z for a state that has since decayed by `decay` (paper §2.1)."""
    q = apply_decay(q, decay.unsqueeze(2))
    parts = [
        recompute(_query_block, q[:, :, :, rows], kv, normalizer, power)
        for rows in _feature_blocks(q, kv.shape[-1], power)
    ]
    return _joined(parts, dim=3)


def update_state(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    kv: Tensor | None,
    normalizer: Tensor | None,
    power: int,
    *,
    in_place: bool,
) -> Sums:
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


def drop_rounding(numerator: Tensor, denominator: Tensor, magnitude: Tensor) -> Sums:
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
        numerator, denominator = recompute(_diagonal_tile, *diagonal)
        if rows.start:
            past = recompute(
                _past_tile,
                *(q[:, :, :, rows], k[:, :, columns], v[:, :, columns], decay[:, :, rows], decay[:, :, columns], power),
            )
            numerator, denominator = numerator + past[0], denominator + past[1]
        sums.append((numerator, denominator))
    return _joined(sums, dim=3)


def _causal_by_halves(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
    """One gate per pair of entries: the later half of the rows attends to the earlier half, and so on within each half.

    Within a diagonal tile decays are computed element by element for each of d/2 pairs, so these tiles must be small,
    and there are many. All tiles of one size are batched as if they were heads, so that the number of calls grows with
    the logarithm of the length as long as `BLOCK_ELEMENTS` allows.
    """
    heads, length = q.shape[:2], q.shape[3]
    tile, halvings = length, 0
    while tile > PAIRWISE_ROWS:
        tile, halvings = -(-tile // 2), halvings + 1
    padding = (tile << halvings) - length  # less than one row a tile
    if padding:
        # A key of zeros has no score, and rows past the end are cut off. Their decay must not increase.
        q, k, v = (pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        decay = torch.cat([decay, decay[:, :, -1:].expand(-1, -1, padding, -1)], dim=2)
    # Time before query heads, so that tiles of all sizes are views of the same tensors, and autograd keeps only these.
    sequences = [x.flatten(0, 1).contiguous() for x in (q.transpose(2, 3), k, v, decay)]

    tiles = _side_by_side(sequences, tile)
    pairwise = q.shape[2] * tile * tile * decay.shape[-1]
    # Decays are float64 and count twice.
    numerator, denominator = _over_heads(partial(recompute, _pairwise_tile), 2 * pairwise, *tiles, power=power)
    for size in (tile << level for level in range(halvings)):
        queries, keys, values, decays = _side_by_side(sequences, 2 * size)
        past = _over_heads(
            attend_to_past,
            q.shape[2] * size * size,
            *(queries[:, :, :, size:], keys[:, :, :size], values[:, :, :size]),
            *(decays[:, :, size:], decays[:, :, :size]),
            power=power,
        )
        numerator = torch.cat([numerator[:, ::2], numerator[:, 1::2] + past[0]], dim=3)
        denominator = torch.cat([denominator[:, ::2], denominator[:, 1::2] + past[1]], dim=3)
    numerator, denominator = (x.squeeze(0).unflatten(0, heads)[:, :, :, :length] for x in (numerator, denominator))
    return numerator, denominator


def _side_by_side(sequences: list[Tensor], rows: int) -> list[Tensor]:
    """Splits (n, t, ...) into tiles, each as a head of its own: (1, n · t / rows, [g,] rows, ·)."""
    q, *others = (x.unflatten(1, (-1, rows)).flatten(0, 1).unsqueeze(0) for x in sequences)
    return [q.transpose(2, 3), *others]


def _over_heads(attend: Callable[..., Sums], elements: int, *tensors: Tensor, power: int) -> Sums:
    """`attend` for as many heads at a time as fit in one block, with `elements` each."""
    heads = max(1, BLOCK_ELEMENTS // elements)
    groups = zip(*(x.split(heads, dim=1) for x in tensors), strict=True)
    return _joined([attend(*group, power) for group in groups], dim=1)


def _past_tile(q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor, column_decay: Tensor, power: int) -> Sums:
    """A tile whose columns all precede its rows."""
    reference = row_decay[:, :, :1]  # lies between all columns and rows, so that no exponent exceeds log 2
    q = apply_decay(q, (row_decay - reference).unsqueeze(2))
    k = apply_decay(k, reference - column_decay)
    return _weighted_sums(even_power(_scores(q, k), power), v)


def _diagonal_tile(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
    """Rows against themselves, one gate for all entries."""
    scores = _scores(q, k) * _decays_within(decay, q.dtype).squeeze(-1).unsqueeze(2)
    return _causal_sums(scores, v, power)


def _pairwise_tile(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, power: int) -> Sums:
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
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(future[:, :, None], float("-inf"))
    return between.to(dtype).exp()


def _future(rows: int, device: torch.device) -> Tensor:
    """Which columns of a tile come after a row: (rows, rows) bool."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)


def _causal_sums(scores: Tensor, v: Tensor, power: int) -> Sums:
    """Weighted sums of a tile of rows against themselves, none of which depends on a later column.

    A weight of zero is not enough where a later key or value is not finite, since 0 · inf is NaN. So scores of later
    columns are overwritten, and values that are not finite are set to zero; rows from such a value on are NaN.
    """
    weights = even_power(scores.masked_fill(_future(scores.shape[-1], scores.device), 0.0), power)
    finite = v.isfinite()
    numerator, denominator = _weighted_sums(weights, v.masked_fill(~finite, 0.0))
    not_finite = ((~finite).cumsum(2) > 0).unsqueeze(2)  # (b, n, 1, rows, e)
    return numerator.masked_fill(not_finite, float("nan")), denominator


def _query_block(q: Tensor, kv: Tensor, normalizer: Tensor, power: int) -> Sums:
    features = symmetric_power_rows(q.flatten(2, 3).mT, power)  # (b, n, D, g · t)
    numerator = features.mT @ kv
    denominator = (normalizer.unsqueeze(2) @ features).squeeze(2)
    with torch.no_grad():
        magnitude = (normalizer.abs().unsqueeze(2) @ features.abs()).squeeze(2)
    return drop_rounding(*(x.unflatten(2, q.shape[2:4]) for x in (numerator, denominator, magnitude)))


def _update_block(k: Tensor, v: Tensor, power: int) -> Sums:
    features = symmetric_power_rows(k.mT, power)  # (b, n, D, t)
    return features @ v, features.sum(-1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q_i · k_j: (b, n, g, rows, columns)."""
    return _group_product(q, k.mT)


def _weighted_sums(weights: Tensor, v: Tensor) -> Sums:
    return _group_product(weights, v), weights.sum(-1)


def _group_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """(b, n, g, t, x) times (b, n, x, y), the g query heads of a key head as one tall product: (b, n, g, t, y)."""
    if not is_known(rows.shape[3]):
        # With a symbolic length, torch cannot infer the strides of the flattened matrix and would specialize on one.
        return rows @ matrix.unsqueeze(2)
    return (rows.flatten(2, 3) @ matrix).unflatten(2, rows.shape[2:4])


def _joined(sums: list[Sums], dim: int) -> Sums:
    if len(sums) == 1:
        return sums[0]
    numerators, denominators = zip(*sums, strict=True)
    return torch.cat(numerators, dim=dim), torch.cat(denominators, dim=dim)


def _rows_in_a_block(q: Tensor, columns: int) -> int | None:
    """How many rows of scores with so many columns fit in one block, for q (b, n, g, t, d).

    None: any number, where batch or length is symbolic.
    """
    if not (is_known(q.shape[0]) and is_known(columns)):
        return None
    return max(MIN_ROWS, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * q.shape[2] * columns))


def _feature_blocks(x: Tensor, value_dim: int, power: int) -> list[slice]:
    """Slices of the time axis of x (b, n, g, t, d) whose features fit in one block, or are no larger than a state."""
    if not is_known(x.shape[0]):
        return slices(x.shape[3], None)
    per_row = x.shape[0] * x.shape[1] * x.shape[2] * symmetric_dim(x.shape[-1], power)
    rows = max(value_dim, BLOCK_ELEMENTS // max(1, per_row))
    return slices(x.shape[3], rows)


def recompute(block: Callable[..., Result], *args: Any) -> Result:
    """Runs a block; if gradients are needed, keeps only its inputs and recomputes it in the backward pass."""
    if torch.compiler.is_exporting():  # only a forward pass is exported
        return block(*args)
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
    return block(*args)
