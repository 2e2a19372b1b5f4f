"""The symmetric power φ^p: the feature map whose inner products are p-th powers (paper §2.1).

φ^p(x) lists every distinct monomial of degree p in the entries of x, each weighted by the square root of its
multinomial coefficient, so that φ^p(x) · φ^p(y) = (x · y)^p. Monomials x_{i1} ⋯ x_{ip} with i1 ≤ … ≤ ip are in
lexicographic order of (i1, …, ip): the order of `itertools.combinations_with_replacement`, and of the second-to-last
axis of `State.kv`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.ops.compilation import check_is_tensor
from sympow.settings import check_degree, check_features, symmetric_dim

Table = TypeVar("Table")


def multi_indices(dim: int, power: int, device: torch.device | None = None) -> Tensor:
    """The index tuples i1 ≤ … ≤ ip behind each feature, in feature order: (D, power) int64."""
    indices = torch.arange(dim, device=device).unsqueeze(1)
    for degree in range(2, power + 1):
        first, rest = _factors(dim, degree, device)
        indices = torch.cat([first.unsqueeze(1), indices[rest]], dim=1)
    return indices


def feature_indices(dim: int, power: int, device: torch.device) -> Tensor:
    """`multi_indices` as kernels read them, kept from call to call: (D, power) int16."""
    return _cached(_short_indices, dim, power, device)


def symmetric_power(x: Tensor, power: int) -> Tensor:
    """φ^p(x), with φ^p(x) · φ^p(y) = (x · y)^p (paper §2.1): (..., d) → (..., D).

    Example:
        >>> x, y = torch.randn(2, 5, dtype=torch.float64)
        >>> bool(torch.isclose(symmetric_power(x, 4) @ symmetric_power(y, 4), (x @ y) ** 4))
        True
    """
    check_degree(power)
    _check_floating("x", x)
    if x.ndim < 1:
        raise ArgumentError("x", "must have at least one axis, got a scalar tensor")
    check_features(x.shape[-1], power)
    if x.ndim == 1:
        return symmetric_power_rows(x.unsqueeze(-1), power).squeeze(-1)
    return symmetric_power_rows(x.mT, power).mT


def symmetric_power_rows(x: Tensor, power: int) -> Tensor:
    """φ^p of column vectors: (..., d, t) → (..., D, t).

    Along this axis every feature is a row, so the products below run over contiguous memory.
    """
    return monomial_rows(x, power) * multinomial_weights(x.shape[-2], power, x.dtype, x.device).unsqueeze(-1)


def monomial_rows(x: Tensor, power: int) -> Tensor:
    """Every product of `power` entries of each column, without weights: (..., d, t) → (..., D, t)."""
    products = x
    for degree in range(2, power + 1):
        first, rest = _cached(_factors, x.shape[-2], degree, x.device)
        products = x.index_select(-2, first) * products.index_select(-2, rest)
    return products


def multinomial_weights(dim: int, power: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """√(p! / ∏ n_i!) for each feature, n_i being how often index i occurs in it: (D,)."""
    # Cached in both dtypes of states, since a conversion would cost each decoding step a launch.
    make = _multinomial_weights if dtype == torch.float64 else _single_weights
    return _cached(make, dim, power, device).to(dtype)


def symmetric_power_of_matrix(matrix: Tensor, power: int) -> Tensor:
    """The P̄ with φ^p(P x) = P̄ φ^p(x) for every x (paper Prop. 3): (m, n) → (D_m, D_n).

    P̄ inherits properties of P: the power of a product is the product of the powers, that of a rotation is a rotation.
    Entry (α, β) sums, over the distinct orderings of the multi-index β, the products P[α_1, β_1] ⋯ P[α_p, β_p],
    and rescales from plain monomials to weighted ones.
    """
    check_degree(power)
    _check_floating("matrix", matrix)
    if matrix.ndim != 2:
        raise ArgumentError("matrix", f"must have two axes, got shape {tuple(matrix.shape)}")
    rows, columns = matrix.shape
    for dim in (rows, columns):
        check_features(dim, power)
    # Column by column: (P x)_{α_1} ⋯ (P x)_{α_p} is a polynomial in x, and its coefficients are collected by
    # multiplying one linear factor in at a time.
    row_indices = multi_indices(rows, power, matrix.device)
    coefficients = matrix[row_indices[:, 0]]
    for degree in range(2, power + 1):
        factor = matrix[row_indices[:, degree - 1]]
        products = factor.unsqueeze(2) * coefficients.unsqueeze(1)
        targets = _product_targets(columns, degree, matrix.device).flatten()
        coefficients = matrix.new_zeros(len(row_indices), symmetric_dim(columns, degree)).index_add(
            1, targets, products.flatten(1)
        )
    row_weights = multinomial_weights(rows, power, matrix.dtype, matrix.device)
    column_weights = multinomial_weights(columns, power, matrix.dtype, matrix.device)
    return row_weights.unsqueeze(1) * coefficients / column_weights


def _check_floating(name: str, tensor: Tensor) -> None:
    check_is_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise ArgumentTypeError(
            name, f"must be floating point, since features have square roots as weights; got {tensor.dtype}"
        )


def even_power(x: Tensor, power: int) -> Tensor:
    """x^power for an even power, by multiplication alone: faster than `pow`, and finite in its gradient at 0."""
    square = x * x
    result, factor, exponent = None, square, power // 2
    while True:
        if exponent & 1:
            result = factor if result is None else result * factor
        exponent >>= 1
        if not exponent:
            break
        factor = factor * factor
    assert result is not None
    return result


def _factors(dim: int, degree: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Each monomial of `degree` as x[first] times a monomial of the degree below: (D,) and (D,) int64."""
    below = symmetric_dim(dim, degree - 1)
    # Those with first index at least i are a suffix of the degree below, since the order is lexicographic.
    starts = [below - symmetric_dim(dim - i, degree - 1) for i in range(dim)]
    rest = torch.cat([torch.arange(start, below, device=device) for start in starts])
    first = torch.cat([torch.full((below - start,), i, device=device) for i, start in enumerate(starts)])
    return first, rest


def _single_weights(dim: int, power: int, device: torch.device) -> Tensor:
    return _multinomial_weights(dim, power, device).to(torch.float32)


def _short_indices(dim: int, power: int, device: torch.device) -> Tensor:
    return multi_indices(dim, power, device).to(torch.int16)


def _multinomial_weights(dim: int, power: int, device: torch.device | None) -> Tensor:
    indices = multi_indices(dim, power, device)
    # The position of each index within its run of equals: their product over a tuple is ∏ n_i!.
    position = torch.ones(len(indices), dtype=torch.float64, device=device)
    repeats = position.clone()
    for column in range(1, power):
        same = indices[:, column] == indices[:, column - 1]
        position = torch.where(same, position + 1, 1.0)
        repeats = repeats * position
    return (float(math.factorial(power)) / repeats).sqrt()


_tables: dict[tuple[str, int, int, torch.device], Any] = {}


def _cached(make: Callable[[int, int, torch.device], Table], dim: int, power: int, device: torch.device) -> Table:
    """A table computed once per device. While torch.compile traces, it is computed as a constant of the graph.

    A table computed while a CUDA graph is captured is not cached: it has no content before the first replay.
    """
    if torch.compiler.is_compiling():
        return make(dim, power, device)
    key = (make.__name__, dim, power, device)
    if key not in _tables and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make(dim, power, device)
    if key not in _tables:
        # An inference tensor could not be used in a later backward pass.
        with torch.inference_mode(False):
            _tables[key] = make(dim, power, device)
    return _tables[key]


def _product_targets(dim: int, degree: int, device: torch.device) -> Tensor:
    """Which degree-n monomial x_i times the j-th degree-(n-1) monomial is: (dim, D_{n-1}) int64."""
    lower = multi_indices(dim, degree - 1, device)
    extended = torch.cat(
        [
            torch.arange(dim, device=device).repeat_interleave(len(lower)).unsqueeze(1),
            lower.repeat(dim, 1),
        ],
        dim=1,
    ).sort(dim=1)[0]
    base = dim ** torch.arange(degree - 1, -1, -1, device=device)
    keys = (multi_indices(dim, degree, device) * base).sum(1)  # increasing, since the order is lexicographic
    return torch.searchsorted(keys, (extended * base).sum(1)).reshape(dim, len(lower))
