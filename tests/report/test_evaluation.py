"""`sympow evaluate`: losses of exported models on held-out documents, as a table, JSON and a figure."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from sympow import GPT, GPTConfig
from sympow.cli import app
from sympow.model.storage import save_model
from sympow.report.evaluation import contexts_up_to, held_out_documents

LENGTH = 48


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, mixer in (("first", "sympow"), ("second", "softmax")):
        config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2, mixer=mixer)
        save_model(folder / name / "model", config, GPT(config).state_dict())
    return folder


def evaluate(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_models_are_compared_on_the_same_documents(runs, tmp_path):
    result = evaluate(runs / "first" / "model", runs / "second" / "model", "--length", LENGTH, "--documents", 2,
                      "--out", tmp_path, "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "first" in result.stdout
    assert "second" in result.stdout
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert (tmp_path / "loss_by_position.png").stat().st_size > 0
    assert content["models"].keys() == {"first", "second"}
    for found in content["models"].values():
        assert found["documents"] == 2
        assert len(found["mean"]) == LENGTH
        assert found["by_context"][str(LENGTH)] == pytest.approx(sum(found["mean"]) / LENGTH, abs=1e-4)


def test_the_losses_are_those_of_the_model(runs, tmp_path):
    evaluate(runs / "first" / "model", "--length", LENGTH, "--documents", 1, "--out", tmp_path, "--device", "cpu")
    found = json.loads((tmp_path / "evaluation.json").read_text())["models"]["first"]["mean"]
    from sympow.model.storage import load_model

    ((inputs, targets),) = held_out_documents("stdlib", LENGTH, 1)
    logits, _ = load_model(runs / "first" / "model")(inputs)
    expected = cross_entropy(logits[0], targets[0], reduction="none").detach()
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-5)


def test_contexts_grow_to_the_length():
    assert contexts_up_to(48) == [1, 4, 16, 48]
    assert contexts_up_to(64) == [1, 4, 16, 64]
    assert contexts_up_to(1) == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", 0), "length and documents must be at least 1, got 0"),
        (("--length", 10**9), "fewer than"),
        (("--data", "nowhere"), "source must be"),
    ],
)
def test_mistakes_are_named(runs, arguments, message):
    result = evaluate(runs / "first" / "model", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
