"""The generated tasks against brute force."""

from itertools import permutations

import numpy as np
import pytest

from experiments.tasks import BOUNDARY, FIRST_LABEL, FIRST_SYMBOL, MASKED, POWER, TASKS, VOCABULARY, draw_recall


def rows_of(name: str, length: int = 40, rows: int = 24) -> list[tuple[list[int], list[int | None]]]:
    """Symbols after the boundary with their labels, both from 0, a label None where it is masked."""
    inputs, labels = TASKS[name].batch([3, 1], rows, length)
    assert inputs.shape == labels.shape == (rows, length)
    assert (inputs[:, 0] == BOUNDARY).all()
    assert (labels[:, 0] == MASKED).all()
    return [
        (
            [int(x) - FIRST_SYMBOL for x in symbols[1:]],
            [None if x == MASKED else int(x) - FIRST_LABEL for x in of[1:]],
        )
        for symbols, of in zip(inputs, labels, strict=True)
    ]


@pytest.mark.parametrize("name", TASKS)
def test_ids_are_in_their_ranges_and_every_class_occurs(name):
    task = TASKS[name]
    inputs, labels = task.batch([0], 256, 64)
    symbols, told = inputs[:, 1:], labels[labels != MASKED]
    assert set(np.unique(symbols)) == set(range(FIRST_SYMBOL, FIRST_SYMBOL + task.symbols))
    assert set(np.unique(told)) == set(range(FIRST_LABEL, FIRST_LABEL + task.classes))
    assert FIRST_SYMBOL + task.symbols <= FIRST_LABEL
    assert FIRST_LABEL + task.classes <= VOCABULARY


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_depends_on_its_arguments_alone(name):
    task = TASKS[name]
    first = task.batch([1, 2], 8, 32)
    task.batch([5], 8, 32)
    again, other = task.batch([1, 2], 8, 32), task.batch([1, 3], 8, 32)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize(("name", "modulus"), [("parity", 2), ("count3", 3), ("count5", 5), ("count8", 8)])
def test_counting(name, modulus):
    for symbols, labels in rows_of(name):
        for i, label in enumerate(labels):
            assert label == sum(symbols[: i + 1]) % modulus


def test_walk_on_s3_moves_three_cups():
    # Elements in the order that the ids have: all arrangements, ascending.
    elements = sorted(permutations(range(3)))
    for symbols, labels in rows_of("s3"):
        cups = ["a", "b", "c"]
        for symbol, label in zip(symbols, labels, strict=True):
            # A step puts the cup at place step[i] into place i.
            cups = [cups[place] for place in elements[symbol]]
            assert cups == [("a", "b", "c")[place] for place in elements[label]]


def test_walk_on_d4_turns_and_reflects_a_square():
    corners = [(0, 0), (0, 1), (1, 1), (1, 0)]
    turn, reflect = (lambda x, y: (y, 1 - x)), (lambda x, y: (y, x))
    symmetries = set()
    for turns in range(4):
        for reflected in (False, True):
            moved = corners
            for _ in range(turns):
                moved = [turn(*corner) for corner in moved]
            if reflected:
                moved = [reflect(*corner) for corner in moved]
            symmetries.add(tuple(corners.index(corner) for corner in moved))
    elements = sorted(symmetries)
    assert len(elements) == 8
    for symbols, labels in rows_of("d4"):
        at = [0, 1, 2, 3]
        for symbol, label in zip(symbols, labels, strict=True):
            at = [at[place] for place in elements[symbol]]
            assert tuple(at) == elements[label]


def test_walk_on_a5_multiplies_rotation_matrices():
    def matrix(element):
        return np.eye(5, dtype=int)[list(element)].T

    elements = [element for element in sorted(permutations(range(5))) if round(np.linalg.det(matrix(element))) == 1]
    assert len(elements) == 60
    for symbols, labels in rows_of("a5", rows=4):
        product = np.eye(5, dtype=int)
        for symbol, label in zip(symbols, labels, strict=True):
            product = product @ matrix(elements[symbol])
            assert (product == matrix(elements[label])).all()


@pytest.mark.parametrize("length", [17, 18, 64])
def test_copying_answers_with_the_symbols_in_order(length):
    blank, marker = 8, 9
    for symbols, labels in rows_of("copy", length=length):
        told = [symbol for symbol in symbols if symbol < blank]
        assert len(told) == 8
        assert symbols[-8:] == [marker] * 8
        assert marker not in symbols[:-8]
        assert labels == [None] * (length - 9) + told


def test_copied_symbols_may_be_anywhere_before_the_markers():
    inputs, _ = TASKS["copy"].batch([0], 512, 32)
    told = (inputs >= FIRST_SYMBOL) & (inputs < FIRST_SYMBOL + 8)
    assert told[:, 1:-8].any(0).all()


def test_induction_answers_with_what_followed_last():
    for symbols, labels in rows_of("induction", length=200):
        for i, label in enumerate(labels):
            earlier = [j for j in range(i) if symbols[j] == symbols[i]]
            assert label == (symbols[earlier[-1] + 1] if earlier else None)


def test_rows_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="length must be at least 17, got 16"):
        TASKS["copy"].batch([0], 1, 16)


@pytest.mark.parametrize(("length", "pairs", "vocabulary"), [(16, 2, 64), (64, 16, 8192), (64, 16, 40), (8, 2, 6)])
def test_rows_have_pairs_then_every_key_once_more(length, pairs, vocabulary):
    tokens, positions, answers = draw_recall([0, 1], 50, length, pairs, vocabulary)
    assert tokens.shape == (50, length)
    assert positions.shape == answers.shape == (50, pairs)
    assert tokens.min() >= 0
    assert tokens.max() < vocabulary
    keys, values = tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2]
    assert keys.min() >= 1
    assert keys.max() < vocabulary // 2 <= values.min()
    for row in range(50):
        assert len(set(keys[row])) == len(set(values[row])) == len(set(positions[row])) == pairs
        told = dict(zip(keys[row], values[row], strict=True))
        assert [told[key] for key in tokens[row, positions[row]]] == answers[row].tolist()
    assert positions.min() >= 2 * pairs
    assert positions.max() < length
    assert not (positions % 2).any()


def test_distances_follow_the_power_law():
    _, positions, _ = draw_recall([3], 20_000, 64, 1)
    gaps = (positions[:, 0] - 2) // 2
    weights = np.arange(1, 32) ** (POWER - 1)
    expected = weights / weights.sum()
    found = np.bincount(gaps, minlength=31) / 20_000
    # Five standard errors of each share.
    assert (abs(found - expected) < 5 * np.sqrt(expected / 20_000)).all()


def test_rows_of_recall_are_the_same_again_and_others_with_another_seed():
    one, again, other = (draw_recall([seed, 5], 4, 32, 4)[0] for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != other).any()


def test_mistakes_in_rows_of_recall_are_named():
    for arguments, message in (
        ((4, 30, 8), "length must be even and at least 4 · pairs = 32, got 30"),
        ((4, 33, 8), "length must be even"),
        ((4, 32, 8, 16), "vocabulary must be even and its half above pairs, 8; got 16"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_recall([0], *arguments)
