"""Printed commands can be pasted into the shell in which they were printed."""

import os
import shlex
import sys

import pytest

from sympow.invocation import command_line, program, recorded_command


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment in the working directory that is not on PATH."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "sympow"):
        path = tmp_path / ".venv" / "bin" / name
        path.touch()
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["examples/demo.py"])
    return tmp_path / ".venv" / "bin"


def test_the_script_is_named_by_its_path_where_the_shell_does_not_find_it(environment, tmp_path, monkeypatch):
    assert program() == ".venv/bin/sympow"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program() == str(environment / "sympow")


def test_the_script_is_named_by_its_name_where_the_shell_finds_it(environment, monkeypatch):
    monkeypatch.setenv("PATH", f"{environment}{os.pathsep}/usr/bin")
    assert program() == "sympow"
    # Not if PATH has another one.
    other = environment.parent / "other"
    other.mkdir()
    (other / "sympow").touch()
    (other / "sympow").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{environment}")
    assert program() == ".venv/bin/sympow"


def test_a_script_elsewhere_is_the_one_that_was_called(environment, tmp_path, monkeypatch):
    script = tmp_path / "scripts" / "sympow"
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert program() == "scripts/sympow"


def test_without_a_script_the_module_is_run(environment):
    (environment / "sympow").unlink()
    assert program() == ".venv/bin/python -m sympow"


def test_short_commands_stay_on_one_line(environment):
    assert command_line("report", "my runs", "-o", "x") == ".venv/bin/sympow report 'my runs' -o x"


def test_long_commands_break_before_flags(environment):
    words = [
        "train",
        "--resume",
        "--out",
        "build/demo/runs/conformal",
        "--steps",
        1000,
        "--data",
        "a b",
        "--no-save",
    ]
    printed = command_line(*words, width=60)
    lines = printed.split("\n")
    assert len(lines) == 3
    assert all(len(line) <= 60 for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    # The shell reads it as one command with these words.
    assert shlex.split(printed.replace("\\\n", "")) == [".venv/bin/sympow", *map(str, words)]


def test_recorded_commands_are_quoted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/sympow", "bench", "--only", "chunked form"])
    assert recorded_command() == "sympow bench --only 'chunked form'"
