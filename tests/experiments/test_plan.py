"""The plan of an experiment: runs are packed into a time limit by estimates from earlier runs."""

import pytest

from sympow.experiments.runner import Estimator, pack
from sympow.experiments.store import condense


@pytest.fixture
def runs(scale):
    return [scale.run("gating", context=32, seed=seed) for seed in range(5)]


def times(runs, *seconds):
    return {run.name: float(x) for run, x in zip(runs, seconds, strict=True)}


def names(allocation):
    return [run.config.run.seed for run in allocation.runs]


def test_all_at_once_without_a_limit(runs):
    (allocation,) = pack(runs, times(runs, 1, 2, 3, 4, 5), jobs=1, limit=None)
    assert names(allocation) == [0, 1, 2, 3, 4]
    assert allocation.seconds == 15


def test_jobs_share_the_time(runs):
    (allocation,) = pack(runs, times(runs, 4, 1, 1, 1, 1), jobs=2, limit=None)
    assert allocation.seconds == 4


def test_what_does_not_fit_waits_and_what_is_shorter_goes_first(runs):
    allocations = pack(runs, times(runs, 6, 6, 3, 6, 1), jobs=1, limit=10)
    assert [names(allocation) for allocation in allocations] == [[0, 2, 4], [1], [3]]
    assert [allocation.seconds for allocation in allocations] == [10, 6, 6]


def test_a_run_longer_than_the_limit_goes_last_and_is_resumed_by_the_next_commands(runs):
    allocations = pack(runs, times(runs, 30, 1, 1, 1, 1), jobs=2, limit=10)
    assert [names(allocation) for allocation in allocations] == [[1, 2, 3, 4, 0], [0], [0]]
    # Eight seconds of the first command are left for it, and ten of each of two more.
    assert [(allocation.seconds, allocation.commands) for allocation in allocations] == [(10, 1), (10, 2), (2, 1)]


def test_the_plan_of_many_commands_is_short(runs):
    allocations = pack(runs, times(runs, *[1e6] * 5), jobs=2, limit=1)
    assert len(allocations) < 10
    assert sum(allocation.commands for allocation in allocations) == 3_000_000
    assert names(allocations[0]) == [0, 1]


def test_an_interrupted_run_comes_first(runs):
    allocations = pack(runs, times(runs, 6, 6, 6, 1, 1), jobs=1, limit=10, begun={runs[2].name})
    assert [names(allocation) for allocation in allocations] == [[2, 3, 4], [0], [1]]


def row(run, seconds, **changes):
    known = {"power": run.power, "context": run.config.data.context, "tokens": run.tokens, "device": "a GPU"}
    return {**known, "jobs": 1, "sittings": 1, "status": "done", "total_seconds": seconds, **changes}


def test_estimates_are_what_runs_of_a_kind_took(scale, runs):
    guess = Estimator(scale, 1).seconds(runs[0])
    assert guess > scale.startup_seconds
    assert Estimator(scale, 1, [row(runs[0], 33), row(runs[0], 44)]).seconds(runs[1]) == 44
    for other in ({"jobs": 2}, {"sittings": 2}, {"status": "diverged"}, {"context": 64}, {"device": "cpu"}):
        assert Estimator(scale, 1, [row(runs[0], 33, **other)]).seconds(runs[1]) == guess


def test_a_shared_device_is_slower(scale, runs):
    alone, shared = (Estimator(scale, jobs).seconds(runs[0]) - scale.startup_seconds for jobs in (1, 4))
    assert shared == pytest.approx(4 * alone)


def test_condensed_metrics_keep_the_means():
    lines = [{"step": n, "loss": float(n), **({"rate": 2.0 * n} if n % 100 == 0 else {})} for n in range(1, 1_001)]
    found = condense(lines, points=100)
    assert [line["step"] for line in found] == list(range(10, 1_001, 10))
    last = [line["loss"] for line in found[-10:]]
    assert sum(last) / 10 == pytest.approx(sum(range(901, 1_001)) / 100)
    assert [line["rate"] for line in found if "rate" in line] == [200.0 * n for n in range(1, 11)]
    assert condense(lines[:7], points=100) == lines[:7]
