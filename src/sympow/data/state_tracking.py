"""Generated tasks with a label at every position: running parity, counting, walks on groups, copying, induction.

A row begins with the boundary token, and a position has a label or is masked. In the tasks that track a state the label
of a position is the state after its symbol: a model has to carry the state over the whole row, and any length can be
generated. Inputs and labels have their own ids in one vocabulary, the same for all tasks, so that models of different
tasks have the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least, check_choice

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

Ids = NDArray[np.int64]
# (generator, rows, length) → symbols and labels, both (rows, length) from 0, labels −1 where masked.
Draw = Callable[[np.random.Generator, int, int], tuple[Ids, Ids]]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: what `find_task` knows it by.
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
        check_at_least("rows", rows, 1)
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


def find_task(name: str) -> Task:
    """The task called `name`: one of TASKS."""
    check_choice("task", name, TASKS)
    return TASKS[name]
