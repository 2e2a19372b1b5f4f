"""Rows of multi-query recall: what they must hold, and how far queries are from their pairs."""

import numpy as np
import pytest

from sympow.data.multi_query_recall import POWER, draw_recall


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


def test_rows_are_the_same_again_and_others_with_another_seed():
    one, again, other = (draw_recall([seed, 5], 4, 32, 4)[0] for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != other).any()


def test_mistakes_are_named():
    for arguments, message in (
        ((4, 30, 8), "length must be even and at least 4 · pairs = 32, got 30"),
        ((4, 33, 8), "length must be even"),
        ((4, 32, 8, 16), "vocabulary must be even and its half above pairs, 8; got 16"),
        ((0, 32, 8), "rows must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_recall([0], *arguments)
