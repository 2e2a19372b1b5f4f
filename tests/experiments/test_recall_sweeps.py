"""Recall sweeps: their rows, early ends, time limits and continuing, the command and the report."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiment_settings import TINY_RECALL
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.data.multi_query_recall import draw_recall
from sympow.experiments import RecallSweep
from sympow.experiments.recall_sweep import best_recall
from sympow.experiments.sweep import StoppedError, SweepResults, run_sweep
from sympow.experiments.sweep_runner import run_sweeps
from sympow.locks import locked
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.report.recall_report import recall_styles
from sympow.train.ensemble import StackedTraining, member_of, stack
from sympow.train.signals import StopRequest

TINY, MODEL = TINY_RECALL, TINY_RECALL.model


def test_every_model_is_given_the_rows_of_its_seed():
    shapes = set()
    for step, (inputs, answers, positions) in enumerate(TINY.batches("cpu")):
        length, pairs = inputs.shape[2], answers.shape[2]
        shapes.add((length, pairs))
        for member, (_, _, seed) in enumerate(TINY.places):
            expected = draw_recall([seed, 0, step], 4, length, pairs, 16)
            for found, wanted in zip((inputs, positions, answers), expected, strict=True):
                assert torch.equal(found[member], torch.from_numpy(wanted))
    assert step == 5
    assert shapes == {(8, 1), (16, 2)}
    later = list(TINY.batches("cpu", first=4))
    assert len(later) == 2
    assert torch.equal(later[1][0], inputs)


def test_answers_are_counted_as_by_a_model_alone():
    torch.manual_seed(0)
    models = [GPT(GPTConfig(vocab_size=16, **MODEL)) for _ in range(4)]
    # One that always answers the same, so that some answers are right.
    training = StackedTraining(stack(models), torch.full((4,), 1e-3), 6, warmup=1)
    row, _ = TINY.evaluate("recall", training, {place[1:]: n for n, place in enumerate(TINY.places)})
    counted = []
    for length, pairs in TINY.evaluation:
        tokens, positions, answers = map(torch.from_numpy, draw_recall([0, 2], 8, length, pairs, 16))
        logits, _ = member_of(training.stacked, 2)(tokens, return_state=False)
        right = logits.argmax(-1).gather(1, positions) == answers
        counted.append(right.double().mean(1))
        assert row["by_shape"][f"{length}/{pairs}"][1][0] == round(right.double().mean().item(), 4)
    assert row["overall"][1][0] == round(torch.cat(counted).mean().item(), 4)
    assert 0 < row["overall"][1][0] < 1
    best = row["learning_rates"].index(row["best_rate"])
    assert best_recall(row)[0] == row["overall"][best]


def test_training_ends_when_all_seeds_of_a_rate_are_there(monkeypatch):
    monkeypatch.setattr(RecallSweep, "validate_every", 2)
    said = []
    found = run_sweep(replace(TINY, target=0.0), "cpu", "a command", say=said.append)
    assert found.rows["recall_tiny"]["steps"] == 2
    assert "step 2 of 6" in said[-1]
    assert run_sweep(replace(TINY, target=1.1), "cpu", "a command").rows["recall_tiny"]["steps"] == 6


def test_a_sweep_that_a_time_limit_ends_continues_to_the_same_result(tmp_path, monkeypatch):
    whole = run_sweep(TINY, "cpu", "a command")
    checkpoint = tmp_path / "sweeps" / "tiny.sweep"
    times = iter(range(1000))
    monkeypatch.setattr("sympow.experiments.sweep.time.monotonic", lambda: next(times))
    with pytest.raises(StoppedError, match=r"stopped at step 3 of 6"):
        run_sweep(TINY, "cpu", "a command", deadline=4, checkpoint=checkpoint)
    with pytest.raises(ValueError, match="other settings"):
        run_sweep(replace(TINY, rows=5), "cpu", "a command", checkpoint=checkpoint)
    said = []
    continued = run_sweep(TINY, "cpu", "a command", checkpoint=checkpoint, say=said.append)
    assert "continued at step" in said[0]
    assert continued.curves == whole.curves
    for name in ("overall", "by_shape", "validation", "best_rate", "steps"):
        assert continued.rows["recall_tiny"][name] == whole.rows["recall_tiny"][name]


def test_a_sweep_that_is_killed_in_its_evaluation_is_not_trained_again(tmp_path, monkeypatch):
    whole, checkpoint = run_sweep(TINY, "cpu", "a command"), tmp_path / "tiny.sweep"
    with monkeypatch.context() as patch:
        patch.setattr(RecallSweep, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_sweep(TINY, "cpu", "a command", checkpoint=checkpoint)
    monkeypatch.setattr(StackedTraining, "update", None)
    assert run_sweep(TINY, "cpu", "a command", checkpoint=checkpoint).curves == whole.curves


def test_a_sweep_whose_results_cannot_be_written_is_not_trained_again(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SweepResults, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            run_sweeps([TINY], SweepResults.read(tmp_path, "mine"), "cpu", str, None, lambda _: None, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine_tiny.sweep"]
    monkeypatch.setattr(StackedTraining, "update", None)
    results = SweepResults.read(tmp_path, "mine")
    assert run_sweeps([TINY], results, "cpu", str, None, lambda _: None, tmp_path / "out") == []
    assert list(SweepResults.read(tmp_path, "mine").rows) == ["recall_tiny"]
    assert list((tmp_path / "out").iterdir()) == []


def test_two_commands_keep_each_others_results(tmp_path):
    both = [SweepResults.read(tmp_path, "mine") for _ in range(2)]
    for name, results in zip("ab", both, strict=True):
        assert run_sweeps([replace(TINY, name=name)], results, "cpu", str, None, lambda _: None, tmp_path / "out") == []
    stored = SweepResults.read(tmp_path, "mine")
    assert list(stored.rows) == list(stored.curves) == ["recall_a", "recall_b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.accuracy.jsonl", "mine.jsonl", "out"]


def test_results_that_are_added_at_the_same_time_are_all_kept(tmp_path):
    def add(first):
        results = SweepResults.read(tmp_path, "mine")
        for number in range(first, first + 20):
            row = {str(number): {"run": str(number), "settings": {}}}
            results.add(SweepResults(Path(), "one", row, row))

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = SweepResults.read(tmp_path, "mine")
    assert stored.rows.keys() == stored.curves.keys() == {str(n) for n in (*range(20), *range(100, 120))}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_that_another_command_trains_is_left_to_it(tmp_path, monkeypatch, jobs):
    said, others = [], SweepResults.read(tmp_path, "mine")
    with monkeypatch.context() as patch:
        patch.setattr(StackedTraining, "update", None)
        with locked(tmp_path / "out" / "mine_tiny.sweep"):
            assert run_sweeps([TINY], others, "cpu", str, None, said.append, tmp_path / "out", jobs=jobs) == ["tiny"]
    assert said == ["tiny: another command is training it"]
    assert not others.table.exists()
    results = SweepResults.read(tmp_path, "mine")
    assert run_sweeps([TINY], results, "cpu", str, None, said.append, tmp_path / "out") == []
    monkeypatch.setattr(StackedTraining, "update", None)
    assert run_sweeps([TINY], others, "cpu", str, None, said.append, tmp_path / "out", jobs=jobs) == []
    assert said[-1] == "tiny: done by another command"
    assert list(others.rows) == ["recall_tiny"]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_that_cannot_be_written_keeps_the_one_before(tmp_path, monkeypatch):
    checkpoint, asked = tmp_path / "tiny.sweep", StopRequest()
    asked.signal = "SIGTERM"
    with pytest.raises(StoppedError):
        run_sweep(TINY, "cpu", "a command", checkpoint=checkpoint, interruption=asked)
    before = checkpoint.read_bytes()

    def fill(state, file):
        Path(file).write_bytes(b"some") if isinstance(file, Path) else file.write(b"some")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(TINY, "cpu", "a command", checkpoint=checkpoint, interruption=asked)
    assert checkpoint.read_bytes() == before
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04" + bytes(40)])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    (tmp_path / "tiny.sweep").write_bytes(content)
    with pytest.raises(ValueError, match=r"tiny.sweep is damaged: remove it to start tiny anew"):
        run_sweep(TINY, "cpu", "a command", checkpoint=tmp_path / "tiny.sweep")


def test_a_signal_stops_a_sweep_and_leaves_the_others(tmp_path):
    asked, said = StopRequest(), []

    def say(line):
        said.append(line)
        asked.signal = "SIGINT"

    results, others = SweepResults.read(tmp_path, "mine"), [replace(TINY, name="second"), replace(TINY, name="third")]
    assert run_sweeps([TINY, *others], results, "cpu", str, None, say, tmp_path / "out", asked) == ["second", "third"]
    assert [line.partition(":")[0] for line in said] == ["tiny"]
    with pytest.raises(StoppedError, match="stopped at step 0 of 6"):
        run_sweep(TINY, "cpu", "a command", checkpoint=tmp_path / "tiny.sweep", interruption=asked)
    assert (tmp_path / "tiny.sweep").is_file()


def test_a_signal_during_training_saves_the_sweep(tmp_path, monkeypatch):
    asked, update = StopRequest(), StackedTraining.update

    def interrupted(training, *batch):
        update(training, *batch)
        asked.signal = "SIGTERM" if training.step == 2 else None

    monkeypatch.setattr(StackedTraining, "update", interrupted)
    results = SweepResults.read(tmp_path, "mine")
    said = []
    assert run_sweeps([TINY], results, "cpu", str, None, said.append, tmp_path / "out", asked) == ["tiny"]
    assert said == ["tiny: stopped at step 2 of 6"]
    assert (tmp_path / "out" / "mine_tiny.sweep").is_file()


def test_an_unfinished_sweep_is_left_for_the_next_call(tmp_path):
    results, said = SweepResults.read(tmp_path, "mine"), []
    longer = replace(TINY, steps=10**6)
    assert run_sweeps([longer], results, "cpu", str, 0.001, said.append, tmp_path / "out") == ["tiny"]
    assert "stopped at step" in said[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine_tiny.sweep"]
    assert not results.table.exists()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="length must be even"):
        replace(TINY, mixture=((8, 4), (16, 2)))
    with pytest.raises(ValueError, match="weights must be"):
        replace(TINY, weights=(1,))
    for name, value, message in (
        ("warmup", -3, "warmup must be at least 0, got -3"),
        ("weight_decay", -1, "weight_decay must be at least 0, got -1"),
        ("weight_decay", float("nan"), "weight_decay must be finite"),
        ("target", float("inf"), "target must be finite"),
        ("mixture", (), "mixture must not be empty"),
        ("evaluation", (), "evaluation must not be empty"),
        ("seeds", (0, -1), "seeds must be at least 0, got -1"),
        ("tokens_known", 2**15 + 2, "tokens_known must be at most 32,768, which is what the int16"),
        ("mixture", ((2**16, 1), (16, 2)), "the length of a shape of mixture must be at most 32,768"),
        (
            "mixture",
            ((16, 2, 1), (16, 1)),
            r"a shape of mixture must be a length and a number of pairs, got \(16, 2, 1\)",
        ),
        ("evaluation", ("64",), "a shape of evaluation must be a tuple or list, got str"),
        ("evaluation", ((16.0, 2),), "length must be an int, got float"),
        ("mixture", [[16, 2], [16, 2]], r"mixture must differ from each other, got \[16, 2\], \[16, 2\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            replace(TINY, **{name: value})
    with pytest.raises(ValueError, match="gating must be one of"):
        replace(TINY, model={**MODEL, "gating": "soft"})


def test_every_kind_of_model_has_a_look_of_its_own_in_the_figure():
    variants = ("gating", "conformal", "unrotated", "pair-rotation")
    kinds = [("softmax", ""), ("softmax, unrotated", "")]
    kinds += [(variant, f"p = 2{more}") for variant in variants for more in ("", ", one layer", ", no MLP")]
    styles = recall_styles(kinds)
    assert list(styles) == kinds
    looks = {(style.light, style.dash, style.marker) for style in styles.values()}
    assert len(looks) == len(kinds)
    colors = {variant: {style.light for (of, _), style in styles.items() if of == variant} for variant, _ in kinds}
    assert all(len(found) == 1 for found in colors.values())
    # The two softmax models share one.
    assert len({color for found in colors.values() for color in found}) == len(variants) + 1


def test_the_command_trains_and_reports(tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    folders = ("--results", tmp_path / "results", "--out", tmp_path / "out")
    wrong = invoke("experiment", "recall", "--scale", "cpu", "--set", "steps=2.5", "--plan", *folders)
    assert wrong.exit_code == 2
    assert "steps must be an int, got float" in wrong.output
    done = invoke("experiment", "recall", "--scale", "cpu", "--set", "steps=2", "--device", "cpu", *folders)
    assert done.exit_code == 0, done.output
    table = tmp_path / "results" / "recall.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert {row["sweep"] for row in rows} == {"gating-w64-4x16", "softmax-w128"}
    assert all(row["state_bytes"] == 4 * row["state_numbers"] > 0 for row in rows)
    pytest.importorskip("matplotlib")
    reported = invoke("report", table, "-o", tmp_path / "report")
    assert reported.exit_code == 0, reported.output
    assert (tmp_path / "report" / "recall_by_state_size.png").stat().st_size > 10_000
    lines = (tmp_path / "report" / "recall.md").read_text().splitlines()
    assert any(line.startswith("| gating-w64-4x16 | 9,824 |") for line in lines)
    assert any("Gated DeltaNet (published)" in line for line in lines)


@pytest.mark.slow
def test_a_short_convolution_learns_to_recall(monkeypatch):
    """In a few hundred steps; without one, 1,500 leave such a model at a third of the answers."""
    monkeypatch.setattr(RecallSweep, "validate_every", 100)
    model = {"layers": 2, "width": 32, "heads": 2, "gating": "scalar", "rotary": "fixed", "short_conv": 4}
    rows = ((16, 2), (16, 4))
    sweep = RecallSweep(
        "learns",
        model,
        learning_rates=(1e-2,),
        seeds=(0,),
        steps=1_500,
        rows=64,
        warmup=50,
        evaluation_rows=256,
        mixture=rows,
        weights=(1, 1),
        evaluation=rows,
        tokens_known=64,
    )
    found = run_sweep(sweep, "cpu", "a command")
    row = found.rows["recall_learns"]
    assert row["overall"][0][0] > 0.95
    assert row["steps"] < 1_000


@pytest.mark.gpu
def test_a_sweep_continues_on_a_gpu_where_it_was_stopped(tmp_path, monkeypatch):
    """In bfloat16, with the kernels."""
    sweep = replace(TINY, model={**MODEL, "width": 64, "heads": 4, "layers": 2}, steps=12, tokens_known=8_192)
    times = iter(range(10_000))
    monkeypatch.setattr("sympow.experiments.sweep.time.monotonic", lambda: next(times))
    with pytest.raises(StoppedError, match=r"stopped at step"):
        run_sweep(sweep, "cuda", "a command", deadline=8, checkpoint=tmp_path / "tiny.sweep")
    found = run_sweep(sweep, "cuda", "a command", checkpoint=tmp_path / "tiny.sweep")
    assert found.rows["recall_tiny"]["steps"] == 12
    losses = [value for of_seed in found.curves["recall_tiny"]["loss"]["value"] for value in of_seed]
    # About log 8,192, that of a guess.
    assert all(8 < loss < 10 for loss in losses)
