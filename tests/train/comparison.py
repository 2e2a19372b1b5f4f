"""Compares metrics of runs with several processes to those of one process."""

from support import assert_close
from sympow.train.metrics import read_metrics

# Sums are taken in another order. Losses are near 5.
ROUNDING = 2e-5
STEPS = 4


def same(run, other):
    """Whether two runs, by their folders, have the same metrics, up to rounding."""
    actual, expected = (read_metrics(folder / "metrics.jsonl") for folder in (run, other))
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert (mine["step"], mine["learning_rate"]) == (theirs["step"], theirs["learning_rate"])
        for name in mine.keys() - {"step", "learning_rate", "tokens_per_second"}:
            tolerance = ROUNDING * (10 if name == "gradient_norm" else 1)
            assert_close(mine[name], theirs[name], tolerance, name)
    return True
