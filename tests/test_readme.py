"""README.md: its Python prints what it shows, and its commands have the flags that they are given.

So have those of docs/commands.md and docs/benchmarks.md. `test_fresh_clone` runs the commands of the first two pages.
"""

import itertools
import re
import runpy
import shlex
import sys

import pytest
import readme
import torch
import typer.main

from sympow.cli.app import app

ROOT = readme.README.parent
COMMANDS = [*readme.shell_commands(), *readme.commands_in_sentences()]


def test_the_pages_have_what_these_tests_are_about():
    assert {block.language for block in readme.blocks()} == {"", "python", "text"}
    commands = readme.shell_commands()
    assert {"make demo", "make test", "sympow train"} <= set(commands)
    assert all(command.split()[0] in readme.PROGRAMS for command in commands)


def test_the_python_of_the_readme_prints_what_stands_below_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (code, shown) = [block.text for block in readme.blocks(readme.README.read_text("utf-8")) if block.language][:2]
    names: dict = {}
    exec(compile(code, str(readme.README), "exec"), names)
    assert capsys.readouterr().out == shown
    assert names["y"].isfinite().all()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("sympow ")])
def test_every_command_has_the_flags_it_is_given(command):
    """Also inline commands, some of which would take too long to run without a GPU."""
    name, *arguments = [part for part in shlex.split(command) if part != "--help"]
    found = typer.main.get_command(app)
    while hasattr(found, "commands"):
        name, *arguments = arguments
        found = found.commands[name]
    # Raises where a flag is unknown or a value has the wrong type.
    assert found.make_context(name, arguments).params


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match(r"python \S+\.py", c)])
def test_scripts_that_are_named_exist_and_know_their_flags(command, monkeypatch, capsys):
    _, script, *arguments = shlex.split(command)
    words = list(itertools.takewhile(lambda argument: not argument.startswith("--"), arguments))
    # In this process, which has imported torch. As in one of its own, modules beside the script are found.
    monkeypatch.setattr(sys, "argv", [script, *words, "--help"])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in arguments if flag.startswith("--"))
