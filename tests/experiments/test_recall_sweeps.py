"""Recall sweeps: their rows, early ends, and their table and figure."""

import signal
from dataclasses import replace

import pytest
import torch
from experiment_settings import TINY_RECALL

from experiments import __main__ as laboratory
from experiments import figures
from experiments.figures import recall_styles
from experiments.recall import RecallSweep, best_recall
from experiments.stacked import StackedTraining, member_of, stack
from experiments.store import Store
from experiments.tasks import draw_recall
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT

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


def test_training_ends_when_all_seeds_of_a_rate_are_there(monkeypatch, tmp_path):
    monkeypatch.setattr(RecallSweep, "validate_every", 2)
    said = []
    (found,) = replace(TINY, target=0.0).train(tmp_path / "one", "cpu", "a command", said.append)
    assert found.row["steps"] == 2
    assert "step 2 of 6" in said[0]
    (found,) = replace(TINY, target=1.1).train(tmp_path / "other", "cpu", "a command", said.append)
    assert found.row["steps"] == 6


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


def test_an_experiment_of_recall_from_its_name_to_its_figure(tmp_path):
    results = tmp_path / "results"
    folders = ("--results", str(results), "--out", str(tmp_path / "out"))
    laboratory.main(["recall", "--set", "steps=2", "--device", "cpu", *folders])
    rows = [result.row for result in Store(results).tables["recall"].values()]
    assert {row["sweep"] for row in rows} == {"gating-w64-4x16", "softmax-w128"}
    assert all(row["state_bytes"] == 4 * row["state_numbers"] > 0 for row in rows)
    pytest.importorskip("matplotlib")
    page, figure = figures.draw(["recall"], results, tmp_path / "report")
    assert figure.stat().st_size > 10_000
    lines = page.read_text().splitlines()
    assert any(line.startswith("| gating-w64-4x16 | 9,824 |") for line in lines)
    assert any("Gated DeltaNet (published)" in line for line in lines)


@pytest.mark.slow
def test_a_short_convolution_learns_to_recall(monkeypatch, tmp_path):
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
    (found,) = sweep.train(tmp_path, "cpu", "a command", print)
    assert found.row["overall"][0][0] > 0.95
    assert found.row["steps"] < 1_000


@pytest.mark.gpu
def test_a_sweep_continues_on_a_gpu_where_it_was_stopped(tmp_path, monkeypatch):
    """In bfloat16, with the kernels."""
    sweep = replace(TINY, model={**MODEL, "width": 64, "heads": 4, "layers": 2}, steps=12, tokens_known=8_192)
    update = StackedTraining.update

    def interrupted(training, *batch):
        update(training, *batch)
        if training.step == 7:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StackedTraining, "update", interrupted)
        assert sweep.train(tmp_path, "cuda", "a command", print) is None
    (found,) = sweep.train(tmp_path, "cuda", "a command", print)
    assert found.row["steps"] == 12
    losses = [value for of_seed in found.curves["loss"]["value"] for value in of_seed]
    # About log 8,192, that of a guess.
    assert all(8 < loss < 10 for loss in losses)
