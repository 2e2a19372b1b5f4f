"""Compares metrics of runs with several processes to those of one process."""

from support import assert_close

# Sums are taken in another order. Losses are near 5.
ROUNDING = 2e-5
# Units of it, by the beginning of a metric's name; 1 for the others. The longest half-life is that of a gate at 0.999:
# it has a thousand times the rounding error of the gate. β follows the last update of a weight, whose size Adam makes
# independent of that of the gradient.
UNITS = {"half_life": 50, "gradient_norm": 10, "beta": 10}
STEPS = 4


def same(actual, expected):
    """Whether two runs have the same metrics, up to rounding."""
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert (mine["step"], mine["learning_rate"]) == (theirs["step"], theirs["learning_rate"])
        for name in mine.keys() - {"step", "learning_rate", "tokens_per_second"}:
            units = next((units for start, units in UNITS.items() if name.startswith(start)), 1)
            assert_close(mine[name], theirs[name], units * ROUNDING, name)
    return True
