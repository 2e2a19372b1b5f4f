"""Generated tasks: those of state tracking, with a label at every position, and associative recall.

State tracking is running parity, counting, walks on groups, copying and induction. A row begins with the boundary
token, and a position has a label or is masked. In the tasks that track a state the label of a position is the state
after its symbol: a model has to carry the state over the whole row, and any length can be generated. Inputs and labels
have their own ids in one vocabulary, the same for all tasks, so that models of different tasks have the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least
from sympow.errors import ArgumentError

# Ids: the boundary, up to 63 input symbols, then labels.
BOUNDARY = 0
FIRST_SYMBOL = 1
FIRST_LABEL = 64
VOCABULARY = 128
# The label of a position that does not count, as PyTorch's cross_entropy ignores it.
MASKED = -100
# Selective copying: tokens to copy, and their kinds. Induction: its symbols.
COPIED, COPIED_KINDS = 8, 8
INDUCTION_SYMBOLS = 32
# Associative recall: its ids, and the weights of distances i, i^(POWER − 1); 1 would be a uniform distribution.
RECALL_VOCABULARY = 8_192
POWER = 0.01

Ids = NDArray[np.int64]
# (generator, rows, length) → symbols and labels, both (rows, length) from 0, labels −1 where masked.
Draw = Callable[[np.random.Generator, int, int], tuple[Ids, Ids]]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: what TASKS knows it by.
        symbols: number of input symbols.
        classes: number of labels; a guess is right with probability 1 / classes.
        shortest: least length of a row.
        draw: draws the symbols after the boundary, and their labels.
    """

    name: str
    symbols: int
    classes: int
    shortest: int
    draw: Draw

    def batch(self, seed: Sequence[int], rows: int, length: int) -> tuple[Ids, Ids]:
        """Inputs and labels, (rows, length) each; the same for the same arguments on every machine.

        Args:
            seed: numbers of at least 0, such as a seed and the number of a step.
            rows: of the batch.
            length: of a row, the boundary included.
        """
        check_at_least("length", length, self.shortest)
        # The name keeps tasks that draw alike from drawing the same rows.
        symbols, labels = self.draw(np.random.default_rng([*seed, *self.name.encode()]), rows, length - 1)
        inputs = np.pad(FIRST_SYMBOL + symbols, ((0, 0), (1, 0)), constant_values=BOUNDARY)
        labels = np.pad(np.where(labels < 0, MASKED, FIRST_LABEL + labels), ((0, 0), (1, 0)), constant_values=MASKED)
        return inputs, labels


def _count(modulus: int) -> Draw:
    """Increments below the modulus; the label is their running sum modulo it."""

    def draw(choose: np.random.Generator, rows: int, length: int) -> tuple[Ids, Ids]:
        steps = choose.integers(modulus, size=(rows, length))
        return steps, steps.cumsum(1) % modulus

    return draw


def multiplication_table(elements: Sequence[tuple[int, ...]]) -> Ids:
    """Products of permutations, a b = "first b, then a", as indices into `elements`: (n, n)."""
    index = {element: number for number, element in enumerate(elements)}
    return np.array([[index[tuple(a[i] for i in b)] for b in elements] for a in elements], np.int64)


def group_elements(name: str) -> list[tuple[int, ...]]:
    """The permutations of "s3", "d4" (the symmetries of a square) or "a5" in ascending order, the identity first."""
    points = {"s3": 3, "d4": 4, "a5": 5}[name]
    found = list(permutations(range(points)))
    if name == "d4":
        # Neighbours of a square's corners stay neighbours.
        return [element for element in found if all((element[i] - element[i - 1]) % 2 for i in range(4))]
    return found if name == "s3" else [element for element in found if _is_even(element)]


def _is_even(element: tuple[int, ...]) -> bool:
    inversions = sum(element[i] > element[j] for j in range(len(element)) for i in range(j))
    return inversions % 2 == 0


def _walk(group: str) -> Draw:
    """Elements of a group; the label is the product of all so far, in order."""
    table = multiplication_table(group_elements(group))

    def draw(choose: np.random.Generator, rows: int, length: int) -> tuple[Ids, Ids]:
        steps = choose.integers(len(table), size=(rows, length))
        products = np.empty_like(steps)
        product = np.zeros(rows, np.int64)
        for i in range(length):
            product = products[:, i] = table[product, steps[:, i]]
        return steps, products

    return draw


def _copy_selectively(choose: np.random.Generator, rows: int, length: int) -> tuple[Ids, Ids]:
    """Eight symbols at random places among blanks, then eight markers, whose labels are these symbols in order."""
    blank, marker = COPIED_KINDS, COPIED_KINDS + 1
    places = np.sort(choose.random((rows, length - COPIED)).argsort(1)[:, :COPIED], axis=1)
    copied = choose.integers(COPIED_KINDS, size=(rows, COPIED))
    symbols = np.full((rows, length), blank)
    np.put_along_axis(symbols, places, copied, axis=1)
    symbols[:, -COPIED:] = marker
    labels = np.full((rows, length), -1)
    labels[:, -COPIED:] = copied
    return symbols, labels


def _induce(choose: np.random.Generator, rows: int, length: int) -> tuple[Ids, Ids]:
    """Random symbols; the label is what followed the symbol at its last occurrence, masked at its first."""
    symbols = choose.integers(INDUCTION_SYMBOLS, size=(rows, length))
    labels = np.empty_like(symbols)
    followed_by = np.full((rows, INDUCTION_SYMBOLS), -1)
    row = np.arange(rows)
    for i in range(length):
        if i:
            followed_by[row, symbols[:, i - 1]] = symbols[:, i]
        labels[:, i] = followed_by[row, symbols[:, i]]
    return symbols, labels


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("parity", 2, 2, 2, _count(2)),
        *(Task(f"count{n}", n, n, 2, _count(n)) for n in (3, 5, 8)),
        *(Task(name, order, order, 2, _walk(name)) for name, order in (("s3", 6), ("d4", 8), ("a5", 60))),
        Task("copy", COPIED_KINDS + 2, COPIED_KINDS, 1 + 2 * COPIED, _copy_selectively),
        Task("induction", INDUCTION_SYMBOLS, INDUCTION_SYMBOLS, 3, _induce),
    )
}


def draw_recall(
    seed: Sequence[int], rows: int, length: int, pairs: int, vocabulary: int = RECALL_VOCABULARY
) -> tuple[Ids, Ids, Ids]:
    """Rows of multi-query associative recall (MQAR) as zoology draws them (Arora et al. 2023).

        k₁ v₁ k₂ v₂ … | x k₂ x x x k₁ x …        labels only at the keys after the bar: v₂, v₁

    The pairs come first: distinct keys of the lower half of the vocabulary, distinct values of the upper half. Then
    every key occurs once more, at even distances that follow a power law, so that most queries come early; random
    tokens lie between them. What follows a query is no part of the row: a model cannot copy an answer from an earlier
    query.

    Returns:
        tokens (rows, length), positions of the queries and their answers, (rows, pairs) each, in the order of the
        pairs; the same for the same arguments on every machine.

    Args:
        seed: numbers of at least 0, such as a seed and the number of a step.
        length: of a row: even, at least 4 · pairs.
        vocabulary: number of ids; id 0 is no key.
    """
    if length % 2 or length < 4 * pairs:
        raise ArgumentError("length", f"must be even and at least 4 · pairs = {4 * pairs}, got {length}")
    if vocabulary % 2 or vocabulary // 2 <= pairs:
        raise ArgumentError("vocabulary", f"must be even and its half above pairs, {pairs}; got {vocabulary}")
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
