"""Rows of multi-query associative recall (MQAR) as zoology draws them (Arora et al. 2023), for models of their own.

    k₁ v₁ k₂ v₂ … | x k₂ x x x k₁ x …        labels only at the keys after the bar: v₂, v₁

The pairs come first: distinct keys of the lower half of the vocabulary, distinct values of the upper half. Then every
key occurs once more, at even distances that follow a power law, so that most queries come early; random tokens
lie between them. What follows a query is no part of the row: a model cannot copy an answer from an earlier query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least

VOCABULARY = 8_192
# Distances i have weights i^(POWER − 1); 1 would be a uniform distribution.
POWER = 0.01

Ids = NDArray[np.int64]


def check_recall(length: int, pairs: int, vocabulary: int = VOCABULARY) -> None:
    """Raises a ValueError unless rows of `length` tokens have room for the pairs and as many queries."""
    check_at_least("pairs", pairs, 1)
    check_at_least("length", length, 1)
    check_at_least("vocabulary", vocabulary, 1)
    if length % 2 or length < 4 * pairs:
        raise ValueError(f"length must be even and at least 4 · pairs = {4 * pairs}, got {length}")
    if vocabulary % 2 or vocabulary // 2 <= pairs:
        raise ValueError(f"vocabulary must be even and its half above pairs, {pairs}; got {vocabulary}")


def draw_recall(
    seed: Sequence[int], rows: int, length: int, pairs: int, vocabulary: int = VOCABULARY
) -> tuple[Ids, Ids, Ids]:
    """Tokens (rows, length), positions of the queries and their answers, (rows, pairs) each, in the order of the pairs.

    The same for the same arguments on every machine.

    Args:
        seed: numbers of at least 0, such as a seed and the number of a step.
        length: of a row: even, at least 4 · pairs.
        vocabulary: number of ids; id 0 is no key.
    """
    check_at_least("rows", rows, 1)
    check_recall(length, pairs, vocabulary)
    choose = np.random.default_rng([*seed, length, pairs])
    half, told = vocabulary // 2, 2 * pairs
    keys = 1 + _distinct(choose, half - 1, rows, pairs)
    values = half + _distinct(choose, half, rows, pairs)
    places = np.arange(1, (length - told) // 2 + 1)
    # The largest of weights with Gumbel noise are a sample without replacement, the first drawn first.
    scores = (POWER - 1) * np.log(places) + choose.gumbel(size=(rows, len(places)))
    gaps = np.argsort(-scores, axis=1)[:, :pairs]
    tokens = choose.integers(vocabulary, size=(rows, length))
    tokens[:, 0:told:2], tokens[:, 1:told:2] = keys, values
    positions = told + 2 * gaps
    np.put_along_axis(tokens, positions, keys, axis=1)
    return tokens, positions, values


def _distinct(choose: np.random.Generator, below: int, rows: int, count: int) -> Ids:
    """`count` distinct numbers below a limit in each row, in random order: rows with repeated ones are drawn again."""
    drawn = choose.integers(below, size=(rows, count))
    if count * count > 2 * below:
        # Few rows would be without repetition.
        return choose.random((rows, below)).argsort(1)[:, :count]
    while True:
        ordered = np.sort(drawn, axis=1)
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
        if not repeated.any():
            return drawn
        drawn[repeated] = choose.integers(below, size=(int(repeated.sum()), count))
