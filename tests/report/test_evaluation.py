"""`sympow evaluate`: losses of exported models on held-out documents, as a table, JSON and a figure."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from sympow import GPT, GPTConfig
from sympow.cli import app
from sympow.data.tokenizer import ByteTokenizer
from sympow.model.storage import save_model
from sympow.report.evaluation import contexts_up_to, held_out_documents

LENGTH = 48


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, mixer in (("first", "sympow"), ("second", "softmax")):
        config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2, mixer=mixer)
        save_model(folder / name / "model", config, GPT(config).state_dict())
        ByteTokenizer().save(folder / name / "model")
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
    assert contexts_up_to(12, 2) == [1, 2, 4, 8, 12]
    assert contexts_up_to(1) == [1]


def test_probes_are_part_of_an_evaluation(runs, tmp_path):
    probes = ("--probe", "recall", "--pairs", 2, "--pairs", 4, "--probe", "passkey", "--distance", 40)
    short = ("--length", LENGTH, "--documents", 1, "--device", "cpu")
    result = evaluate(runs / "first" / "model", *short, *probes, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "evaluation.json").read_text())["models"]["first"]
    assert {point["pairs"] for point in found["recall"]} == {2, 4}
    assert [point["distance"] for point in found["passkey"]] == [40]
    # What it has not learned, it can only guess.
    assert all(point["loss"] == pytest.approx(5.5, abs=0.5) for point in found["recall"])
    assert (tmp_path / "probes.png").stat().st_size > 0
    assert (tmp_path / "loss_by_context.png").stat().st_size > 0
    assert "Associative recall" in result.stdout
    assert "Passkey" in result.stdout


def test_the_length_is_four_times_the_training_context(runs, tmp_path):
    (runs / "first" / "config.yaml").write_text("data: {context: 8}\n")
    evaluate(runs / "first" / "model", "--documents", 1, "--device", "cpu", "--out", tmp_path)
    found = json.loads((tmp_path / "evaluation.json").read_text())["models"]["first"]
    assert found["trained_at"] == 8
    assert list(found["by_context"]) == ["1", "2", "4", "8", "16", "32"]


def test_runs_of_one_name_are_told_apart(runs):
    result = evaluate(runs / "first" / "model", runs / "first" / "model")
    assert result.exit_code == 2
    assert "runs with different names, got first, first" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", 0), "length must be at least 1, got 0"),
        (("--documents", 0), "documents must be at least 1, got 0"),
        (("--length", 10**9), "has no document of --length=1,000,000,000 tokens"),
        (("--data", "nowhere", "--length", 8), "Error: --data must be"),
        (("--probe", "sight"), "probe must be one of 'recall', 'passkey'; got 'sight'"),
        (("--probe", "recall", "--pairs", 0, "--length", 8), "pairs must be numbers of at least 1, got (0,)"),
    ],
)
def test_mistakes_are_named(runs, arguments, message):
    result = evaluate(runs / "first" / "model", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
