"""Compares metrics of runs with several processes to those of one process."""

from support import assert_close

# Sums in another order. Losses are near 5.
ROUNDING = 2e-5
STEPS = 4


def same(actual, expected):
    """Whether two runs have the same numbers, but for rounding."""
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert (mine["step"], mine["learning_rate"]) == (theirs["step"], theirs["learning_rate"])
        for name in mine.keys() - {"step", "learning_rate", "tokens_per_second"}:
            # The longest half-life is of a gate at 0.999: a rounding there is a thousand times as much here.
            tolerance = 1e-3 if name.startswith("half_life") else ROUNDING * (10 if name == "gradient_norm" else 1)
            assert_close(mine[name], theirs[name], tolerance, name)
    return True
