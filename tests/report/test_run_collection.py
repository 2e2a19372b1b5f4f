"""Collecting runs from run folders and experiments."""

import json
import math
from dataclasses import replace

import pytest
import torch
from report.made_up import write_evaluation, write_run

from sympow.evaluate import PasskeyPoint, PositionLosses
from sympow.evaluate.evaluation_file import ModelEvaluation, averages_over_ranges
from sympow.report.run_collection import collect, collection_of


def test_folders_of_runs_are_searched_and_named_by_what_tells_them_apart(tmp_path):
    write_run(tmp_path / "a" / "deep" / "seed0", [3.0])
    write_run(tmp_path / "a" / "b", [2.0])
    (tmp_path / "a" / "b" / "checkpoints").mkdir()
    (tmp_path / "a" / "b" / "checkpoints" / "config.yaml").write_text("no run: {}")
    found = collect([tmp_path, tmp_path / "a" / "b"])
    assert [run.name for run in found.runs] == ["b", "deep/seed0"]
    assert found.notes == []


def test_the_final_loss_is_the_mean_of_the_last_tenth(tmp_path):
    losses = [10.0] * 27 + [1.0, 2.0, 6.0]
    write_run(tmp_path / "run", losses, lines={20: {"heldout_loss": 9.0}, 28: {"heldout_loss": 4.5}})
    (run,) = collect([tmp_path]).runs
    assert run.final_loss == pytest.approx((1 + 2 + 6) / 3)
    assert run.final_heldout_loss == 4.5
    assert run.finished


def test_a_run_under_way_is_marked_and_one_without_steps_left_out(tmp_path):
    write_run(tmp_path / "half", [3.0, 2.0], steps=10)
    write_run(tmp_path / "none", [], steps=10)
    found = collect([tmp_path])
    assert [run.name for run in found.runs] == ["half"]
    assert not found.runs[0].finished
    assert any("none has no logged step yet" in note for note in found.notes)
    assert any("Unfinished" in note and "half" in note for note in found.notes)


def test_a_setting_that_this_version_does_not_know_is_kept(tmp_path):
    config = write_run(tmp_path / "run", [3.0], layers=7) / "config.yaml"
    config.write_text(config.read_text().replace("model:", "model:\n  unheard_of: 3"))
    (run,) = collect([tmp_path]).runs
    assert (run.settings["layers"], run.settings["unheard_of"]) == (7, 3)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", "a: [", "config.yaml: not YAML"),
        ("config.yaml", "model: 3", "must map the sections"),
        ("config.yaml", "model: {}\ndata: {}\noptimizer: {}\nrun: {}\n", r"config\.yaml lacks vocab_size, layers, "),
        ("metrics.jsonl", '{"loss": 1}\n{"step": 1}\n', "line 1 has no step"),
        ("heads.json", "{}", "heads.json is not a table of head statistics"),
    ],
)
def test_damage_is_named(tmp_path, file, content, message):
    folder = write_run(tmp_path / "run", [3.0])
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        collect([tmp_path])


def test_paths_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"runs must be folders, and .*nowhere is none"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="there is no run in"):
        collect([tmp_path])


def test_averages_by_context_are_those_of_the_positions(tmp_path):
    mean = [float(n % 7) for n in range(100)]
    write_run(tmp_path / "run", [3.0], evaluation=mean)
    (run,) = collect([tmp_path]).runs
    assert sorted(run.evaluation.by_context) == [1, 2, 4, 8, 16, 32, 64, 100]
    for context, loss in run.evaluation.by_context.items():
        assert loss == pytest.approx(sum(mean[:context]) / context)
    assert run.evaluation.length == 100


def test_ranges_of_positions_meet_and_their_means_weigh_up_to_the_whole():
    losses = [float(n) for n in range(1000)]
    centres, means = averages_over_ranges(losses)
    assert centres == sorted(centres)
    # Of a straight line the mean over a range is its middle: near the geometric centre, from below.
    for centre, mean in zip(centres, means, strict=True):
        assert centre * 0.9 - 1 < mean < centre * 1.1 + 1
    assert centres[0] > 8
    assert centres[-1] < 1000


def test_evaluations_find_their_runs(tmp_path):
    write_run(tmp_path / "x" / "one", [3.0])
    write_run(tmp_path / "x" / "two", [3.0], evaluation=[1.0, 1.0])
    write_run(tmp_path / "y" / "same", [3.0])
    write_run(tmp_path / "z" / "same", [3.0])
    write_evaluation(
        tmp_path / "compared" / "evaluation.json", {"one": [2.0] * 4, "two": [5.0] * 4, "same": [1.0], "gone": [1.0]}
    )
    found = collect([tmp_path])
    evaluations = {run.name: run.evaluation for run in found.runs}
    assert evaluations["x/one"].by_context[4] == 2.0
    # Of two, the longer.
    assert evaluations["x/two"].by_context[4] == 5.0
    assert evaluations["y/same"] is None
    assert any("same" in note and "several runs" in note for note in found.notes)
    assert any("gone" in note and "no run has that name" in note for note in found.notes)


def test_averages_by_context_alone_will_do(tmp_path):
    folder = write_run(tmp_path / "run", [3.0])
    by_position = {"9.5": 2.25, "12.0": 2.125}
    content = {"models": {"run": {"documents": 1, "by_context": {"4": 2.5, "16": 2.0}, "by_position": by_position}}}
    (folder / "evaluation.json").write_text(json.dumps(content))
    (run,) = collect([tmp_path]).runs
    assert run.evaluation.by_context == {4: 2.5, 16: 2.0}
    assert run.evaluation.by_position == {9.5: 2.25, 12.0: 2.125}


@pytest.mark.parametrize("positions", [True, False])
def test_losses_that_are_not_numbers_are_written_and_read(tmp_path, positions):
    folder = write_run(tmp_path / "run", [3.0])
    losses = PositionLosses(torch.tensor([2.0] * 8 + [math.nan] * 8), torch.full((16,), math.nan), 1)
    passkey = [PasskeyPoint(64, 0.0, 3.0, math.nan, 1)]
    evaluation = ModelEvaluation(losses, passkey=passkey)
    # NaN is not JSON.
    content = json.dumps({"models": {"run": evaluation.as_json(positions=positions)}}, allow_nan=False)
    (folder / "evaluation.json").write_text(content)
    (run,) = collect([tmp_path]).runs
    assert run.evaluation.by_context[8] == 2
    assert math.isnan(run.evaluation.by_context[16])
    assert all(map(math.isnan, run.evaluation.by_position.values()))
    assert run.evaluation.passkey[0]["control"] is None


def test_what_else_is_known_of_a_run_counts(tmp_path):
    write_run(tmp_path / "run", [3.0, 2.0], lines={2: {"heldout_loss": 9.0}}, steps=5)
    (run,) = collect([tmp_path]).runs
    found = collection_of([replace(run, result={"status": "diverged", "heldout_loss": 2.5})])
    assert (run.final_heldout_loss, found.runs[0].final_heldout_loss) == (9.0, 2.5)
    assert found.notes == ["Diverged (the loss was not finite), and omitted from final losses: run."]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"recall": 0.5}, "it has no 'models'"),
        ({"models": {"run": {}}}, "it has neither 'by_context' nor 'mean'"),
        ({"models": {"run": None}}, "an entry has another form than"),
        ({"models": {"run": [2.0]}}, "an entry has another form than"),
        ({"models": {"run": {"mean": 2.0}}}, "an entry has another form than"),
        ({"models": {"run": {"by_context": [2.0]}}}, "an entry has another form than"),
        ({"models": {"run": {"mean": [2.0], "recall": [0.5]}}}, "an entry has another form than"),
    ],
)
def test_an_evaluation_of_another_form_is_noted(tmp_path, content, why):
    folder = write_run(tmp_path / "run", [3.0])
    (folder / "evaluation.json").write_text(json.dumps(content))
    found = collect([tmp_path])
    assert found.runs[0].evaluation is None
    assert any(why in note for note in found.notes)
