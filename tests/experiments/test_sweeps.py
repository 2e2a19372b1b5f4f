"""Sweeps on state tracking: the data that each model is given, their results, resuming, tables and figures."""

import json
from dataclasses import replace

import pytest
import torch

from experiments import __main__ as laboratory
from experiments import figures
from experiments.figures import accuracy_table
from experiments.grid import SCALES
from experiments.stacked import StackedTraining
from experiments.state_tracking import TrackingSweep, _mean_score, best_accuracies
from experiments.store import Store
from experiments.sweep import CHECKPOINT, Sweep
from experiments.tasks import TASKS
from sympow.train.signals import StopRequest

SWEEPS = ("recall", "state_tracking", "tracking_remedies", "tracking_longer", "tracking_curriculum")
MODEL = {"layers": 1, "width": 8, "heads": 2, "gating": "none", "rotary": "pairs"}
TINY = TrackingSweep(
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


def trained(sweep, folder, say=lambda _: None):
    return sweep.train(folder, "cpu", "a command", say)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return trained(TINY, tmp_path_factory.mktemp("found"))


def test_every_model_is_given_the_rows_of_its_task_and_seed():
    steps = list(TINY.batches("cpu"))
    later = list(TINY.batches("cpu", first=2))
    assert len(later) == 1
    assert torch.equal(later[0][0], steps[2][0])
    assert len(steps) == 3
    members = [(task, seed) for task in TINY.tasks for _ in TINY.learning_rates for seed in TINY.seeds]
    for member, (task, seed) in enumerate(members):
        inputs, labels = TASKS[task].batch([seed, 0, 0], 3 * 4, 18)
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
    assert [result.name for result in found] == list(TINY.results) == ["parity_tiny", "copy_tiny"]
    for result in found:
        row, curves = result.row, result.curves
        assert TINY.differences(row) == []
        assert replace(TINY, steps=4).differences(row) == ["steps 3 and 4"]
        assert row["best_rate"] in TINY.learning_rates
        assert list(best_accuracies(row)) == [18, 36]
        accuracies = [x for by_rate in row["accuracy"].values() for of_seeds in by_rate for x in of_seeds]
        assert len(accuracies) == 2 * 2 * 2
        assert all(0 <= x <= 1 for x in accuracies)
        assert len(curves["loss"]["value"]) == 2
        assert curves["loss"]["step"] == [1, 2, 3]
        places = curves["by_position"]["position"]
        assert max(places) < 36
        assert all(len(of_seed) == len(places) for of_seed in curves["by_position"]["accuracy"])


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
    for result, whole in zip(trained(TINY, tmp_path), found, strict=True):
        json.dumps([result.row, result.curves], allow_nan=False)
        values = [[of_seed[0], None, None] for of_seed in whole.curves["loss"]["value"]]
        assert result.curves["loss"]["value"] == values


def test_noise_on_keys_changes_what_is_learned_and_is_the_same_again(tmp_path):
    quiet = replace(TINY, steps=12)
    losses = [
        trained(sweep, tmp_path / str(number))[0].curves["loss"]["value"]
        for number, sweep in enumerate((quiet, *[replace(quiet, key_noise=2.0)] * 2))
    ]
    assert losses[1] == losses[2]
    assert losses[0][0][0] == losses[1][0][0], "no noise at the first step"
    assert losses[0] != losses[1]


def stopped_after(step, monkeypatch):
    """Makes a signal arrive in training."""
    request, update = StopRequest(), StackedTraining.update

    def interrupted(training, *batch):
        update(training, *batch)
        request.signal = "SIGTERM" if training.step == step else None

    class Stop:
        __enter__ = staticmethod(lambda: request)
        __exit__ = staticmethod(lambda *_: None)

    monkeypatch.setattr(StackedTraining, "update", interrupted)
    monkeypatch.setattr("experiments.sweep.stop_on_signals", Stop)


def test_a_sweep_that_a_signal_stops_continues_to_the_same_result(tmp_path, monkeypatch):
    # More steps than are drawn together, with noise, whose generator has to continue.
    longer = replace(TINY, steps=20, key_noise=0.5)
    whole, said = trained(longer, tmp_path / "whole"), []
    with monkeypatch.context() as patch:
        stopped_after(17, patch)
        assert trained(longer, tmp_path / "one", said.append) is None
    assert said == ["tiny: SIGTERM: saved after step 17 of 20"]
    with pytest.raises(ValueError, match=r"checkpoint.pt is of another sweep, device or version: remove it"):
        trained(replace(longer, tasks=("count3", "copy")), tmp_path / "one")
    continued = trained(longer, tmp_path / "one", said.append)
    assert said[1] == "tiny: continued at step 17 of 20"
    assert [result.curves for result in continued] == [result.curves for result in whole]


def test_a_sweep_that_is_killed_in_its_evaluation_is_not_trained_again(tmp_path, found, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(TrackingSweep, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained(TINY, tmp_path)
    monkeypatch.setattr(StackedTraining, "update", None)
    assert [result.curves for result in trained(TINY, tmp_path)] == [result.curves for result in found]
    TINY.discard(tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()


def test_values_that_sweeps_cannot_have_are_named(tmp_path):
    for name, value, message in (
        ("learning_rates", (), "learning_rates must be values that differ, at least one"),
        ("seeds", (1, 1), r"seeds must be values that differ, at least one; got \(1, 1\)"),
        ("lengths", "short", "lengths must be one of 'fixed', 'random', 'growing'; got 'short'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TINY, **{name: value})
    with pytest.raises(ValueError, match=r"models cannot be stacked: .* is not of a linear map"):
        trained(replace(TINY, model={**MODEL, "gating": "learned"}), tmp_path)
    with pytest.raises(ValueError, match="length must be at least 17, got 16"):
        trained(replace(TINY, length=16), tmp_path)


def test_what_can_be_set_of_a_sweep():
    assert TINY.changed({"steps": 4, "key_noise": 1}) == replace(TINY, steps=4, key_noise=1)
    for changes, message in (
        ({"width": 3}, "--set cannot change width of the sweep tiny"),
        ({"seeds": [1]}, "--set cannot change seeds of the sweep tiny"),
        ({"steps": 2.5}, "--set steps must be of type int, got 2.5"),
        ({"lengths": 3}, "--set lengths must be of type str, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            TINY.changed(changes)


def test_the_table_says_100_only_of_all_answers():
    row = {"task": "parity", "sweep": "x", "chance": 0.5, "learning_rates": [1, 2], "best_rate": 2}
    accuracy = {"8": [[0, 0], [1.0, 1.0]], "32": [[0, 0], [0.9999, 1.0]], "128": [[0, 0], [0.5, 0.75]]}
    assert list(accuracy_table([{**row, "accuracy": accuracy}]))[-1] == "| x | 100, 99.9, 62.5 |"


@pytest.mark.parametrize("size", ["cpu", "small"])
@pytest.mark.parametrize("name", SWEEPS)
def test_the_experiments_compare_like_with_like(name, size):
    sweeps = laboratory.EXPERIMENTS[name](SCALES[size]())
    assert all(isinstance(sweep, Sweep) for sweep in sweeps)
    assert laboratory.EXPERIMENTS[name].__doc__
    names = [sweep.name for sweep in sweeps]
    assert len(set(names)) == len(names)
    settings = [sweep.settings() for sweep in sweeps]
    assert all(settings.count(one) == 1 for one in settings)
    for alike in ("task_names", "learning_rates", "steps", "rows", "evaluation_rows"):
        assert len({getattr(sweep, alike) for sweep in sweeps}) == 1, alike
    # More seeds where a comparison is close.
    assert all(sweep.seeds[0] == 0 for sweep in sweeps)


def test_an_experiment_of_sweeps_from_its_name_to_its_figure(tmp_path, capsys):
    results = tmp_path / "results"
    command = ["state_tracking", "--only", "conf*", "--results", str(results), "--out", str(tmp_path / "out")]
    laboratory.main([*command, "--set", "steps=2", "--device", "cpu"])
    rows = [result.row for result in Store(results).tables["state_tracking"].values()]
    assert {row["run"] for row in rows} == {"parity_conformal", "copy_conformal"}
    assert rows[0]["command"].startswith("python -m experiments state_tracking --scale cpu --only conformal ")
    assert rows[0]["command"].endswith(" --set steps=2")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["state_tracking_conformal.lock"]
    with pytest.raises(SystemExit):
        laboratory.main([*command, "--plan"])
    assert "parity_conformal in " in (said := capsys.readouterr().err)
    assert "has other settings: steps 2 and 12" in said
    pytest.importorskip("matplotlib")
    page, figure = figures.draw(["state_tracking"], results, tmp_path / "report")
    assert "| conformal |" in page.read_text()
    assert figure.stat().st_size > 10_000


def test_the_scale_of_the_paper_has_no_sweeps(tmp_path, capsys):
    for name in ("state_tracking", "recall"):
        with pytest.raises(SystemExit):
            laboratory.main([name, "--scale", "paper", "--results", str(tmp_path)])
        assert f"--scale must be cpu or small for {name}, got paper" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_all_sweeps_run_at_the_smallest_scale(name, tmp_path):
    laboratory.main([name, "--results", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert len(Store(tmp_path).tables[name]) >= 2
