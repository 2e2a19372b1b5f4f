"""`sympow train`: flags, config files and presets, and error messages."""

import os
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from train.conftest import as_flags
from typer.testing import CliRunner

from sympow.cli import train as train_cli
from sympow.cli.app import app
from sympow.model.config import GPTConfig
from sympow.settings import GATES
from sympow.train import TrainConfig
from sympow.train.config import SECTIONS, laptop
from sympow.train.metrics import read_metrics

runner = CliRunner()
SMALL = [
    *("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-tokens", "128", "--steps", "2"),
    *("--save-every", "0", "--log-every", "1", "--no-tensorboard", "--device", "cpu"),
]


def invoke(*arguments):
    return runner.invoke(app, ["train", *map(str, arguments)], terminal_width=200)


def said(result):
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def asked(monkeypatch):
    """The arguments that the command passes to the trainer, instead of training."""
    seen = SimpleNamespace()

    def remember(config, out, *, resume, device):
        seen.config, seen.out, seen.resume, seen.device = config, out, resume, device
        return out

    monkeypatch.setattr("sympow.train.trainer.train", remember)
    return seen


def test_every_flag_reaches_its_field(asked):
    """Each flag is given a value that is not the default."""
    others = {"data": "elsewhere", "wandb": "project", "heads": 8, "chunk_size": 32, "key_value_heads": 2}
    others |= {"evaluate_every": 5, "evaluate_tokens": 640}
    others |= {"power": 4, "context": 2_048, "head_dim": 16, "width": 256}
    choices = {"gating": "vector", "rotary": "pairs", "form": "chunked", "backend": "torch", "short": "pack"}
    choices |= {"schedule": "cosine", "precision": "bf16", "parallel": "fsdp"}
    changes = {}
    for part, kind in SECTIONS.items():
        for field in fields(kind):
            value = getattr(getattr(laptop(), part), field.name)
            if field.name in ("vocab_size", "mixer", "short_conv"):
                continue
            if field.name in others | choices:
                changes[field.name] = (others | choices)[field.name]
            elif isinstance(value, bool):
                changes[field.name] = not value
            elif isinstance(value, int):
                changes[field.name] = 2 * value + (0 if value else 3)
            else:
                changes[field.name] = value / 2 + 0.01
            assert changes[field.name] != value, field.name
    result = invoke(*as_flags(changes), "--out", "x")
    assert result.exit_code == 0, result.output
    assert asked.config == laptop().changed(**changes)


def test_a_short_convolution_is_asked_for_and_refused_with_context_parallelism(asked):
    assert invoke("--short-conv", 4, "--out", "x").exit_code == 0
    assert asked.config == laptop().changed(short_conv=4)
    refused = invoke("--short-conv", 4, "--context-parallel", 2, "--out", "x")
    assert refused.exit_code == 2
    assert "--short-conv is not supported with context_parallel above 1" in said(refused)


def test_flags_override_a_file_or_a_preset(asked, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(TrainConfig().changed(steps=11, context=256, power=4).to_yaml())
    assert invoke("--config", file, "--steps", "12").exit_code == 0
    assert asked.config == TrainConfig().changed(steps=12, context=256, power=4)
    assert invoke("--preset", "paper", "--power", "4", "--context", "16384").exit_code == 0
    assert asked.config.run.batch_tokens == 524_288
    assert (asked.config.model.power, asked.config.data.context) == (4, 16_384)
    assert invoke("--preset", "paper", "--model", "byte-11m", "--layers", "4").exit_code == 0
    assert asked.config.model == GPTConfig.preset("byte-11m", layers=4)
    assert not asked.resume
    # A file has values for all fields, so a preset beside it would be ignored.
    refused = invoke("--preset", "paper", "--config", file)
    assert refused.exit_code == 2
    assert "Error: --preset and --config are both configs to start from: give one of them; got" in said(refused)


def test_what_would_have_no_effect_is_refused(asked, tmp_path):
    (tmp_path / "config.yaml").write_text(TrainConfig().to_yaml())
    refused = invoke("--preset", "paper", "--resume", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "Error: --preset is for a new run: --resume continues one with its own settings; got" in said(refused)
    refused = invoke("--final-rate", "0.5")
    assert refused.exit_code == 2
    assert "Error: --final-rate has no effect with the schedule constant: give --schedule too; got 0.5" in said(refused)
    assert invoke("--final-rate", "0.5", "--schedule", "cosine").exit_code == 0
    assert asked.config.optimizer.final_rate == 0.5


@pytest.mark.parametrize(
    ("habit", "flag", "text"),
    [
        ("--lr", "--learning-rate", "The peak of the schedule"),
        ("--batch-size=8", "--batch-tokens", "Tokens of a batch"),
    ],
)
def test_names_of_other_programs_lead_to_the_flags(habit, flag, text):
    refused = invoke(habit, "1")
    assert refused.exit_code == 2
    assert f"Error: there is no {habit.partition('=')[0]}; use {flag}: {text}" in said(refused)


def test_every_flag_that_is_suggested_exists():
    printed = invoke("--help").output
    for flag, others in train_cli.HABITS.items():
        assert f"{flag} " in printed
        for other in others:
            assert f"{other} " not in printed


@pytest.mark.parametrize("curve", ["softmax", "sympow", "gated", "conformal"])
@pytest.mark.parametrize("power", [2, 4])
def test_flags_give_every_curve_of_the_paper(asked, curve, power):
    flags = {
        "softmax": ["--mixer", "softmax", "--gating", "none", "--rotary", "fixed"],
        "sympow": ["--power", power, "--gating", "none", "--rotary", "fixed"],
        "gated": ["--power", power, "--gating", "scalar", "--rotary", "fixed"],
        "conformal": ["--power", power, "--gating", "scalar", "--rotary", "scale"],
    }[curve]
    result = invoke("--preset", "paper", "--data", "/data", "--context", "4096", *flags)
    assert result.exit_code == 0, result.output
    model = asked.config.model
    assert model.mixer == ("softmax" if curve == "softmax" else "sympow")
    assert (model.gating == "scalar") == (curve in ("gated", "conformal"))
    assert (model.rotary == "scale") == (curve == "conformal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mixer", "linear"), "Error: --mixer must be one of 'sympow', 'softmax'; got 'linear'"),
        (("--short", "pad"), "Error: --short must be one of 'refuse', 'drop', 'join', 'pack'; got 'pad'"),
        (("--precision", "fp16"), "precision must be one of 'bf16', 'fp32'; got 'fp16'"),
        (("--preset", "huge"), "Error: --preset must be one of 'laptop', 'paper'; got 'huge'"),
        (("--model", "gpt5"), "Error: --model must be one of 'gpt2-124m'"),
        (("--steps", "many"), "Invalid value for '--steps'"),
        (("--steps", "0"), "Error: --steps must be at least 1, got 0"),
        (("--context", "100"), "Error: --batch-tokens must be a multiple of the context, 100; got 4096"),
        (("--config", "nowhere.yaml"), "nowhere.yaml cannot be read: No such file or directory"),
        (("--resume",), "there is no run in runs/ to resume; name one with --out"),
        (("--resume", "--out", "nowhere"), "nowhere/config.yaml cannot be read"),
        (("--data", "nowhere", "--device", "cpu"), "Error: --data must be 'stdlib'"),
        (("--device", "tpu"), "Error: --device must be one of 'cuda', 'cpu'; got 'tpu'"),
        (("--layer", "3"), "No such option"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in said(result)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "variant",
    [
        ("--mixer", "softmax"),
        ("--mixer", "softmax", "--gating", "fixed", "--rotary", "none"),
        ("--power", "4", "--gating", "none", "--rotary", "fixed"),
        ("--gating", "vector", "--rotary", "pairs"),
        ("--gating", "learned", "--rotary", "learned"),
        ("--precision", "bf16", "--clip-norm", "0.1"),
    ],
)
def test_variants_train_from_the_command_line(texts, tmp_path, variant):
    out = tmp_path / "run"
    result = invoke("--data", texts, "--out", out, *SMALL, *variant)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(out)
    first, last = read_metrics(out / "metrics.jsonl")
    assert last["loss"] != first["loss"]
    assert 3 < last["loss"] < 7


def test_help_has_sections_and_the_default_of_every_flag():
    """Every field is a flag, but for the vocabulary's size, which the data determine."""
    result = runner.invoke(app, ["train", "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert "vocab-size" not in result.output
    assert all(f'"{choice}"' in said(result) for choice in GATES)
    sections = result.output.partition("\nOptions:\n")[2]
    titles = [line.removesuffix(":") for line in sections.splitlines() if line and not line.startswith(" ")]
    assert titles == [f"{name.capitalize()} options" for name in SECTIONS]
    text = " ".join(sections.replace("no-\n", "no-").split())
    for part, kind in SECTIONS.items():
        for field in fields(kind):
            if field.name == "vocab_size":
                continue
            _, found, of_flag = text.partition(f" --{field.name.replace('_', '-')} ")
            assert found
            value = getattr(getattr(laptop(), part), field.name)
            shown = of_flag.partition("[default: ")[2].partition("]")[0].replace("- ", "-")
            if isinstance(value, bool):
                assert shown == ("" if value else "no-") + field.name.replace("_", "-")
            elif value not in (None, ""):
                assert shown == str(value), field.name
            else:
                assert len(shown) > 3, field.name


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--data", "nowhere"), 2),
        (("--context-parallel", "2"), 2),
        (("--tensorboard",), 1),
        (("--wandb", "project"), 1),
    ],
)
def test_a_training_that_is_refused_leaves_nothing_behind(tmp_path, monkeypatch, arguments, code):
    monkeypatch.chdir(tmp_path)
    for module in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    for out in ([], ["--out", "elsewhere/run"]):
        result = invoke(*SMALL, *arguments, *out)
        assert result.exit_code == code, result.output
        assert list(tmp_path.iterdir()) == []
    result = invoke("--resume", "--device", "cpu")
    assert "there is no run in runs/ to resume" in said(result)


def test_a_folder_with_a_run_is_refused_unless_resumed(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("--data", texts, "--out", "runs/first", *SMALL).exit_code == 0
    result = invoke("--data", texts, "--out", "runs/first", *SMALL)
    assert result.exit_code == 2
    assert "runs/first holds a run already" in said(result)
    # Without --out, the latest run; its settings are those it wrote.
    result = invoke("--resume", "--steps", "4", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert len(read_metrics("runs/first/metrics.jsonl")) == 4
    assert TrainConfig.read("runs/first/config.yaml").run.steps == 4


def test_the_latest_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("b", "c", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
        os.utime(tmp_path / "runs" / name / "config.yaml", (age, age))
    assert str(train_cli._latest()) == "runs/a"


def test_the_defaults_train_on_the_standard_library(tmp_path):
    out = tmp_path / "run"
    result = invoke("--out", out, "--steps", "1", "--context", "64", "--batch-tokens", "128", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "the standard library of Python" in result.output
    assert (out / "model" / "model.safetensors").is_file()
