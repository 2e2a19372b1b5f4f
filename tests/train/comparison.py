"""Compares metrics of runs with several processes to those of one process."""

from support import assert_close

# Sums are taken in another order. Losses are near 5.
ROUNDING = 2e-5
STEPS = 4


def same(actual, expected):
    """Whether two runs have the same metrics, up to rounding."""
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert (mine["step"], mine["learning_rate"]) == (theirs["step"], theirs["learning_rate"])
        for name in mine.keys() - {"step", "learning_rate", "tokens_per_second"}:
            # The longest half-life is that of a gate at 0.999: it has a thousand times the rounding error of the gate.
            tolerance = 1e-3 if name.startswith("half_life") else ROUNDING * (10 if name == "gradient_norm" else 1)
            assert_close(mine[name], theirs[name], tolerance, name)
    return True
