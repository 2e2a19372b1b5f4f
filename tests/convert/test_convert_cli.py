"""The command `sympow convert`: in a process of its own, and its flags."""

import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from convert.tiny import TINY, losses_of
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.cli.convert import SECTIONS
from sympow.convert.config import ConvertConfig

runner = CliRunner()


def flags(settings):
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


@pytest.mark.slow
def test_a_conversion_from_the_command_line(teacher, texts, tmp_path):
    out = tmp_path / "converted"
    words = [str(teacher), "--data", str(texts), "--out", str(out), "--device", "cpu", *flags(TINY)]
    command = [sys.executable, "-m", "sympow", "convert", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out / 'model'}\n"
    assert "step 8 of 8  loss" in done.stderr
    assert "tokens/s" in done.stderr
    assert "held-out loss of the student after distillation:" in done.stderr
    assert (out / "report.html").is_file()
    assert len(losses_of(out, "distill")) == 8


@pytest.fixture
def asked(monkeypatch):
    """What the command would convert."""
    seen = SimpleNamespace(complete=True)

    def remember(teacher, config, out, *, device):
        seen.teacher, seen.config, seen.out, seen.device = teacher, config, out, device
        return seen.complete

    monkeypatch.setattr("sympow.convert.conversion.convert", remember)
    return seen


def test_every_flag_reaches_its_field(asked):
    """Each flag is given a value that is not the default."""
    changes = {"layers": "0,2", "gating": "vector", "rotary": "pairs", "data": "elsewhere", "short": "drop"}
    changes |= {"precision": "fp32", "evaluate_factors": "1,2", "initial_gate": 0.9, "warmup": 0.3, "beta2": 0.9}
    for section in SECTIONS.values():
        for field in fields(section):
            value = field.default
            if field.name not in changes:
                changes[field.name] = not value if isinstance(value, bool) else 2 * value if value else 2_048
    assert changes.keys() == ConvertConfig().settings().keys()
    result = runner.invoke(app, ["convert", "some/teacher", "--out", "there", "--device", "cpu", *flags(changes)])
    assert result.exit_code == 0, result.output
    assert asked.config.settings() == changes
    assert (asked.teacher, str(asked.out), asked.device) == ("some/teacher", "there", "cpu")


def test_an_interrupted_conversion_says_so(asked):
    asked.complete = False
    result = runner.invoke(app, ["convert", "teacher", "--out", "there"])
    assert result.exit_code == 130
    assert "stopped; the same command continues" in result.stderr


def test_mistakes_name_the_flag(tmp_path):
    result = runner.invoke(app, ["convert", "teacher", "--out", str(tmp_path / "out"), "--batch-tokens", "100"])
    assert result.exit_code == 2
    assert "--batch-tokens must be a multiple of the context, 2,048; got 100" in result.stderr
    result = runner.invoke(app, ["convert", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert result.exit_code == 2
    assert f"{tmp_path} has no config.json" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_transformers_shows_does_not_clutter_the_output(teacher, texts, tmp_path):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    out = tmp_path / "converted"
    settings = {**TINY, "match_tokens": 0, "distill_tokens": 0}
    words = ["convert", str(teacher), "--data", str(texts), "--out", str(out), "--device", "cpu", *flags(settings)]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out / 'model'}\n"
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["teacher", "held-out", "held-out", "wrote"]
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
    # Nor do a model's other commands show it.
    generated = runner.invoke(
        app, ["generate", str(out / "model"), "--prompt", "1", "--tokens", "2", "--device", "cpu"]
    )
    assert generated.exit_code == 0, generated.output
    assert generated.stderr == ""
