"""Curves against numbers computed directly."""

import json

import pytest
from report.made_up import write_run

from sympow.report.curves import Curve, by_layer, curve, mean_and_range, median_speed, metric_names, seconds_at, smooth
from sympow.report.run_collection import collect


def run_of(folder, *arguments, **options):
    write_run(folder / "run", *arguments, **options)
    (run,) = collect([folder]).runs
    return run


def test_a_short_run_keeps_every_step(tmp_path):
    found = curve(run_of(tmp_path, [3.0, 2.0, 1.5]), "loss")
    assert found == Curve([1, 2, 3], [3.0, 2.0, 1.5], [1, 1, 1])


def test_a_long_run_is_thinned_to_means_that_lose_nothing(tmp_path):
    losses = [1 + (n * 37 % 101) / 50 for n in range(2000)]
    found = curve(run_of(tmp_path, losses), "loss", points=100)
    assert len(found.steps) <= 100
    assert found.steps[-1] == 2000
    # The first steps stay single points, for a logarithmic axis.
    assert found.steps[:4] == [1, 2, 3, 4]
    start = 0
    for stop, value, count in zip(found.steps, found.values, found.counts, strict=True):
        assert count == stop - start
        assert value == pytest.approx(sum(losses[start:stop]) / count)
        start = stop


def test_metrics_that_come_now_and_then_keep_their_steps(tmp_path):
    run = run_of(tmp_path, [1.0] * 6, lines={3: {"heldout_loss": 2.0}, 6: {"heldout_loss": float("nan"), "other": 1}})
    assert metric_names(run) == ["loss", "heldout_loss", "other"]
    assert curve(run, "heldout_loss") == Curve([3], [2.0], [1])


def test_metrics_that_were_condensed_keep_their_steps(tmp_path):
    folder = write_run(tmp_path / "run", [], steps=4000)
    lines = [{"step": step, "loss": step / 1000} for step in range(50, 4001, 50)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = collect([tmp_path]).runs
    found = curve(run, "loss")
    assert found.steps == [line["step"] for line in lines]
    assert found.values == pytest.approx([line["loss"] for line in lines])
    assert run.final_loss == pytest.approx((3.65 + 4.0) / 2)


def test_points_of_seeds_agree_though_one_is_under_way(tmp_path):
    write_run(tmp_path / "a", [1.0] * 1500, steps=1500)
    write_run(tmp_path / "b", [1.0] * 700, steps=1500, seed=1)
    done, under_way = (set(curve(run, "loss").steps) for run in collect([tmp_path]).runs)
    # All points but the last, which can have fewer steps, end at the same steps.
    assert under_way < done


def test_seconds_follow_the_logged_speed(tmp_path):
    lines = {2: {"tokens_per_second": 64.0}, 4: {"tokens_per_second": 256.0}}
    run = run_of(tmp_path, [1.0] * 5, lines=lines, batch_tokens=128)
    # Two steps at 2 s, two at half a second, and one more as fast as those.
    assert seconds_at(run, [1, 2, 3, 4, 5]) == pytest.approx([2.0, 4.0, 4.5, 5.0, 5.5])


def test_without_speeds_there_is_no_time(tmp_path):
    run = run_of(tmp_path, [1.0] * 5)
    assert seconds_at(run, [1, 2]) is None
    assert median_speed(run) is None


def test_the_first_reading_does_not_count_as_speed(tmp_path):
    speeds = {1: 1.0, 2: 10.0, 3: 30.0, 4: 20.0, 5: 40.0}
    run = run_of(tmp_path, [1.0] * 5, lines={step: {"tokens_per_second": x} for step, x in speeds.items()})
    assert median_speed(run) == 25.0


def test_smoothing_is_the_mean_of_the_steps_in_its_window():
    steps = [1, 2, 3, 5, 8, 13, 14, 20]
    values = [9.0, 1.0, 4.0, 2.0, 7.0, 3.0, 5.0, 8.0]
    counts = [1, 1, 1, 2, 3, 5, 1, 6]
    for window in (0, 2, 5, 12, 100):
        expected = []
        for step in steps:
            reach = min(window / 2, step - 1)
            near = [(v, c) for s, v, c in zip(steps, values, counts, strict=True) if abs(s - step) <= reach]
            expected.append(sum(v * c for v, c in near) / sum(c for _, c in near))
        assert smooth(Curve(steps, values, counts), window) == pytest.approx(expected)


def test_mean_and_range_are_of_shared_steps():
    assert mean_and_range([{1: 2.0, 2: 4.0}, {2: 8.0, 3: 1.0}]) == {2: (6.0, 4.0, 8.0)}


def test_metrics_by_layer_become_a_table(tmp_path):
    lines = {2: {"half_life/layer_0": 5.0, "half_life/layer_1": 6.0}, 4: {"half_life/layer_1": 7.0}}
    found = by_layer(run_of(tmp_path, [1.0] * 4, lines=lines))
    assert found == {"half_life": ([2, 4], [[5.0, None], [6.0, 7.0]])}
