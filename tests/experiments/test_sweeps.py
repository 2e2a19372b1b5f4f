"""Sweeps: the data that each model is given, their results on disk, resuming, limits, the command and the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.data.state_tracking import find_task
from sympow.experiments import Sweep
from sympow.experiments.grid import describe, find_sweeps, sweeps_of
from sympow.experiments.sweep import StoppedError, SweepResults, run_sweep
from sympow.experiments.sweep_runner import run_sweeps
from sympow.experiments.tracking_sweep import _mean_score, best_accuracies
from sympow.report.sweep_report import accuracy_table
from sympow.train.ensemble import StackedTraining

FOLDER = Path(__file__).parents[2] / "experiments"
MODEL = {"layers": 1, "width": 8, "heads": 2, "gating": "none", "rotary": "pairs"}
TINY = Sweep(
    "tiny",
    MODEL,
    tasks=("parity", "copy"),
    learning_rates=(1e-3, 1e-2),
    seeds=(0, 3),
    length=18,
    steps=3,
    rows=4,
    warmup=1,
    factors=(1, 2),
    evaluation_rows=4,
)


@pytest.fixture(scope="module")
def found():
    return run_sweep(TINY, "cpu", "a command")


def test_every_model_is_given_the_rows_of_its_task_and_seed():
    steps = list(TINY.batches("cpu"))
    later = list(TINY.batches("cpu", first=2))
    assert len(later) == 1
    assert torch.equal(later[0][0], steps[2][0])
    assert len(steps) == 3
    members = [(task, seed) for task in TINY.tasks for _ in TINY.learning_rates for seed in TINY.seeds]
    for member, (task, seed) in enumerate(members):
        inputs, labels = find_task(task).batch([seed, 0, 0], 3 * 4, 18)
        for step, (given, told) in enumerate(steps):
            assert given.shape == told.shape == (8, 4, 18)
            rows = slice(4 * step, 4 * step + 4)
            assert torch.equal(given[member], torch.from_numpy(inputs[rows]))
            assert torch.equal(told[member], torch.from_numpy(labels[rows]))


def test_random_lengths_vary_and_fit_every_task():
    sweep = replace(TINY, length=64, lengths="random", steps=200, rows=1)
    lengths = {given.shape[-1] for given, _ in sweep.batches("cpu")}
    assert lengths == {17, 24, 32, 40, 48, 56, 64} & lengths
    assert len(lengths) > 4


def test_growing_lengths_grow_to_the_whole_and_stay():
    sweep = replace(TINY, length=64, lengths="growing", steps=320, rows=1)
    lengths = [given.shape[-1] for given, _ in sweep.batches("cpu")]
    assert lengths == sorted(lengths)
    assert lengths[0] == 17
    assert lengths.count(64) >= 0.3 * 320
    assert len(set(lengths)) > 8
    # Those of a sweep that is continued are the same.
    assert [given.shape[-1] for given, _ in sweep.batches("cpu", 100)] == lengths[100:]


def test_a_sweep_has_a_row_for_every_task(found):
    assert set(found.rows) == set(found.curves) == {"parity_tiny", "copy_tiny"}
    for name, row in found.rows.items():
        assert row["settings"] == TINY.settings()
        assert row["best_rate"] in TINY.learning_rates
        assert list(best_accuracies(row)) == [18, 36]
        accuracies = [x for by_rate in row["accuracy"].values() for of_seeds in by_rate for x in of_seeds]
        assert len(accuracies) == 2 * 2 * 2
        assert all(0 <= x <= 1 for x in accuracies)
        curve = found.curves[name]
        assert len(curve["loss"]["value"]) == 2
        assert curve["loss"]["step"] == [1, 2, 3]
        assert max(curve["by_position"]["position"]) < 36
        assert all(
            len(of_seed) == len(curve["by_position"]["position"]) for of_seed in curve["by_position"]["accuracy"]
        )


def test_the_best_rate_is_chosen_by_accuracy_then_loss():
    assert _mean_score([(0.9, 1.0), (0.7, 1.0)]) > _mean_score([(0.7, 0.1), (0.8, 0.1)])
    assert _mean_score([(1.0, 0.1)]) > _mean_score([(1.0, 0.2)])


@pytest.mark.parametrize("diverged", [float("nan"), float("inf")])
def test_a_rate_at_which_a_model_diverged_is_not_the_best(diverged):
    every = _mean_score([(0.6, 1.0)] * 3)
    two = _mean_score([(1.0, 0.1), (1.0, 0.1), (0.0, diverged)])
    one = _mean_score([(1.0, 0.1), (1.0, diverged), (1.0, diverged)])
    none = _mean_score([(1.0, diverged)] * 3)
    assert every > two > one > none


def test_results_of_a_model_that_diverged_are_json(tmp_path, found, monkeypatch):
    measured = StackedTraining.losses

    def diverge(self):
        logged, losses = measured(self)
        losses[:, 1] = float("nan")
        losses[:, 2] = float("inf")
        return logged, losses

    monkeypatch.setattr(StackedTraining, "losses", diverge)
    results = SweepResults.read(tmp_path, "mine")
    assert run_sweeps([TINY], results, "cpu", str, None, lambda _: None) == []

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    for path in (results.table, results.accuracies):
        lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
        assert {line["run"] for line in lines} == set(found.rows)
    for line in lines:
        first = found.curves[line["run"]]["loss"]["value"]
        assert line["loss"]["value"] == [[of_seed[0], None, None] for of_seed in first]


def test_a_sweep_is_the_same_again(found):
    again = run_sweep(TINY, "cpu", "a command")
    assert [row["accuracy"] for row in again.rows.values()] == [row["accuracy"] for row in found.rows.values()]
    assert again.curves == found.curves


def test_noise_on_keys_changes_what_is_learned_and_is_the_same_again():
    quiet = replace(TINY, steps=12)
    losses = [
        run_sweep(sweep, "cpu", "a command").curves["parity_tiny"]["loss"]["value"]
        for sweep in (quiet, *[replace(quiet, key_noise=2.0)] * 2)
    ]
    assert losses[1] == losses[2]
    assert losses[0][0][0] == losses[1][0][0], "no noise at the first step"
    assert losses[0] != losses[1]


def test_finished_sweeps_are_skipped_and_others_kept(tmp_path, found, monkeypatch):
    ran = []

    def run(sweep, *_):
        ran.append(sweep.name)
        return SweepResults(
            Path(),
            sweep.name,
            {
                f"{task}_{sweep.name}": {
                    **found.rows[f"{task}_tiny"],
                    "run": f"{task}_{sweep.name}",
                    "sweep": sweep.name,
                }
                for task in TINY.tasks
            },
            {
                f"{task}_{sweep.name}": {**found.curves[f"{task}_tiny"], "run": f"{task}_{sweep.name}"}
                for task in TINY.tasks
            },
        )

    monkeypatch.setattr("sympow.experiments.sweep_runner.run_sweep", run)

    def all_of(sweeps):
        return run_sweeps(sweeps, SweepResults.read(tmp_path, "mine"), "cpu", str, None, lambda _: None)

    first, second = replace(TINY, name="first"), replace(TINY, name="second")
    assert all_of([first]) == []
    assert all_of([first, second]) == []
    assert ran == ["first", "second"]
    stored = SweepResults.read(tmp_path, "mine")
    assert len(stored.rows) == len(stored.curves) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.accuracy.jsonl", "mine.jsonl"]
    with pytest.raises(ValueError, match=r"parity_first in .* has other settings: steps"):
        all_of([replace(first, steps=4)])


def test_a_sweep_that_a_time_limit_ends_continues_to_the_same_result(tmp_path, monkeypatch):
    # More steps than are drawn together, with noise, whose generator has to continue.
    longer = replace(TINY, steps=20, key_noise=0.5)
    whole = run_sweep(longer, "cpu", "a command")
    times = iter(range(1000))
    monkeypatch.setattr("sympow.experiments.sweep.time.monotonic", lambda: next(times))
    with pytest.raises(StoppedError, match=r"stopped at step 17 of 20"):
        run_sweep(longer, "cpu", "a command", deadline=18, checkpoint=tmp_path / "one.sweep")
    with pytest.raises(ValueError, match=r"one.sweep is of another sweep, device or version, or has other settings"):
        run_sweep(replace(longer, tasks=("count3", "copy")), "cpu", "a command", checkpoint=tmp_path / "one.sweep")
    continued = run_sweep(longer, "cpu", "a command", checkpoint=tmp_path / "one.sweep")
    assert continued.curves == whole.curves


def test_damaged_results_are_named(tmp_path):
    for second in ('{"run"', '{"run": "of a grid", "config": {}}'):
        (tmp_path / "mine.jsonl").write_text('{"run": "a", "settings": {}}\n' + second + "\n")
        with pytest.raises(ValueError, match=r"mine.jsonl: line 2 is not the result of a sweep"):
            SweepResults.read(tmp_path, "mine")


def test_sweeps_have_names_of_their_own():
    def mine(size):
        return {"none": [], "two": [TINY, replace(TINY, rows=3)], "one": [TINY]}[size]

    with pytest.raises(ValueError, match="mine has no sweeps at scale 'none'"):
        sweeps_of(mine, "none")
    with pytest.raises(ValueError, match=f"mine has two sweeps of the name {TINY.name}. Give them different names"):
        sweeps_of(mine, "two")
    assert sweeps_of(mine, "one") == [TINY]


def test_mistakes_in_a_sweep_are_named():
    with pytest.raises(ValueError, match="length must be at least 17, got 16"):
        replace(TINY, length=16)
    with pytest.raises(ValueError, match="gating must be one of"):
        replace(TINY, model={**MODEL, "gating": "soft"})
    with pytest.raises(ValueError, match=r"key_noise must be at least 0, got -1"):
        replace(TINY, key_noise=-1)
    with pytest.raises(ValueError, match="task must be one of"):
        replace(TINY, tasks=("party",))
    with pytest.raises(ValueError, match="lengths must be one of 'fixed', 'random', 'growing'; got 3"):
        replace(TINY, lengths=3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rates", (), "learning_rates must not be empty"),
        ("learning_rates", (1e-3, 1e-3), "learning_rates must differ from each other, got 0.001, 0.001"),
        ("learning_rates", (-1.0,), "learning_rates must be above 0, got -1.0"),
        ("learning_rates", (float("nan"),), "learning_rates must be finite, got nan"),
        ("seeds", (), "seeds must not be empty"),
        ("seeds", (1, 1), "seeds must differ from each other, got 1, 1"),
        ("seeds", (0, -1), "seeds must be at least 0, got -1"),
        ("tasks", (), "tasks must not be empty"),
        ("tasks", ("copy", "copy"), "tasks must differ from each other, got copy, copy"),
        ("factors", (), "factors must not be empty"),
        ("factors", (0, 1), "factors must be at least 1, got 0"),
        ("factors", (2, 1), "factors must be in ascending order, got 2, 1"),
        (
            "model",
            MODEL | {"gating": "learned"},
            "model of a sweep must not have gating='learned', which cannot be stacked",
        ),
        (
            "model",
            MODEL | {"rotary": "learned"},
            "model of a sweep must not have rotary='learned', which cannot be stacked",
        ),
        ("learning_rates", 1e-3, "learning_rates must be a tuple or list, got float"),
        ("seeds", 3, "seeds must be a tuple or list, got int"),
        ("tasks", "parity", "tasks must be a tuple or list, got str"),
        ("factors", 4, "factors must be a tuple or list, got int"),
    ],
)
def test_values_that_sweeps_cannot_have_are_named(name, value, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
        replace(TINY, **{name: value})


def test_the_table_says_100_only_of_all_answers():
    row = {"task": "parity", "sweep": "x", "chance": 0.5, "learning_rates": [1, 2], "best_rate": 2}
    accuracy = {"8": [[0, 0], [1.0, 1.0]], "32": [[0, 0], [0.9999, 1.0]], "128": [[0, 0], [0.5, 0.75]]}
    assert list(accuracy_table([{**row, "accuracy": accuracy}]))[-1] == "| x | 100, 99.9, 62.5 |"


@pytest.mark.parametrize("size", ["cpu", "small"])
@pytest.mark.parametrize("name", find_sweeps(FOLDER))
def test_the_experiments_compare_like_with_like(name, size):
    sweeps = find_sweeps(FOLDER)[name](size)
    assert describe(find_sweeps(FOLDER)[name])
    names = [sweep.name for sweep in sweeps]
    assert len(set(names)) == len(names)
    settings = [sweep.settings() for sweep in sweeps]
    assert all(settings.count(one) == 1 for one in settings)
    for alike in ("task_names", "learning_rates", "longest", "steps", "rows", "evaluation_rows"):
        assert len({getattr(sweep, alike) for sweep in sweeps}) == 1, alike
    # More seeds where a comparison is close.
    assert all(sweep.seeds[0] == 0 for sweep in sweeps)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_runs_and_reports_a_sweep(tmp_path):
    command = ("experiment", "state_tracking", "--scale", "cpu", "--only", "conf*", "--results", tmp_path / "results")
    planned = invoke(*command, "--plan")
    assert planned.exit_code == 0, planned.output
    assert "conformal" in planned.output
    assert "new" in planned.output
    done = invoke(*command, "--set", "steps=2", "--device", "cpu")
    assert done.exit_code == 0, done.output
    table = tmp_path / "results" / "state_tracking.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert {row["run"] for row in rows} == {"parity_conformal", "copy_conformal"}
    assert rows[0]["command"] == "sympow experiment state_tracking --scale cpu --only conformal --set steps=2"
    refused = invoke(*command, "--device", "cpu")
    assert refused.exit_code == 2
    assert "has other settings: steps" in " ".join(refused.output.split())
    pytest.importorskip("matplotlib")
    reported = invoke("report", table, "-o", tmp_path / "report")
    assert reported.exit_code == 0, reported.output
    assert (tmp_path / "report" / "state_tracking_by_position.png").stat().st_size > 10_000
    assert "| conformal |" in (tmp_path / "report" / "state_tracking.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "stdlib"), "data is not for state_tracking, whose models are trained on generated rows"),
        (("--set", "width=3"), "set takes length, key_noise, lengths, steps, rows, warmup, evaluation_rows for"),
        (("--set", "lengths=3"), "lengths must be one of 'fixed', 'random', 'growing'; got 3"),
    ],
)
def test_flags_that_do_not_apply_are_refused(flags, message, tmp_path):
    done = invoke("experiment", "state_tracking", "--scale", "cpu", "--results", tmp_path, *flags)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_the_scale_of_the_paper_has_no_sweeps(tmp_path):
    for name in ("state_tracking", "recall"):
        refused = invoke("experiment", name, "--scale", "paper", "--results", tmp_path)
        assert refused.exit_code == 2
        assert "--scale must be one of 'cpu', 'small'; got 'paper'" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("name", find_sweeps(FOLDER))
def test_all_sweeps_run_at_the_smallest_scale(name, tmp_path):
    done = invoke("experiment", name, "--scale", "cpu", "--results", tmp_path, "--device", "cpu")
    assert done.exit_code == 0, done.output
