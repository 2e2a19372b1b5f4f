"""README.md: its code blocks run, its commands have the flags they are given, and run in a clone.

`SMALL` adds flags to commands that would otherwise take minutes.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import readme
import torch
import typer.main

from sympow.cli.app import app

ROOT = readme.README.parent
SMALL_RUN = "--steps 2 --layers 1 --width 16 --heads 2 --batch-tokens 512 --no-tensorboard"
# Flags added to a command, by its first words; the longest match counts.
SMALL = {
    "make demo": "ARGS=--tiny",
    "make forms": "ARGS=--tiny",
    "make test": "ARGS=tests/ops/test_paper.py",
    "sympow train": SMALL_RUN,
    "sympow train --data": SMALL_RUN + " --context 128",
    "sympow train --resume": "",
    "sympow generate": "--tokens 5",
    "sympow evaluate": "--documents 2",
    "sympow inspect": "--tokens 200",
    "sympow check": "--no-timing",
}
TEXTS = ("books/one.txt", "books/two.txt", "books/three.txt", "book.txt")


def small(command: str) -> str:
    beginnings = [beginning for beginning in SMALL if command.startswith(beginning)]
    return f"{command} {SMALL[max(beginnings, key=len)]}" if beginnings else command


def test_the_readme_has_what_these_tests_are_about():
    assert {block.language for block in readme.blocks()} == {"", "python"}
    commands = readme.shell_commands()
    assert {"make demo", "make test", "sympow train"} <= set(commands)
    assert all(command.split()[0] in readme.PROGRAMS for command in commands)
    assert all(any(command.startswith(beginning) for command in commands) for beginning in SMALL)


def test_code_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for block in readme.blocks():
        if block.language == "python":
            exec(compile(block.text, str(readme.README), "exec"), names)
    assert names["y"].isfinite().all()
    assert (tmp_path / "state.pt").exists()


@pytest.mark.parametrize(
    "command",
    [c for c in [*readme.shell_commands(), *readme.commands_in_sentences()] if c.startswith("sympow ")],
)
def test_every_command_has_the_flags_it_is_given(command):
    """Also inline commands, some of which would take too long to run without a GPU."""
    name, *arguments = [part for part in shlex.split(command) if part != "--help"]
    found = typer.main.get_command(app)
    while hasattr(found, "commands"):
        name, *arguments = arguments
        found = found.commands[name]
    # Raises where a flag is unknown or a value has the wrong type.
    assert found.make_context(name, arguments).params


@pytest.mark.parametrize("command", [c for c in readme.commands_in_sentences() if re.match(r"python \S+\.py", c)])
def test_scripts_that_are_named_exist_and_know_their_flags(command, monkeypatch, capsys):
    _, script, *flags = shlex.split(command)
    # In this process, which has imported torch. As in one of its own, modules beside the script are found.
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in flags if flag.startswith("--"))


@pytest.mark.slow
def test_every_command_from_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    make_environment(clone / ".venv")
    type_in(clone, readme.shell_commands(), clone / ".venv")
    assert (clone / "runs/first/model/model.safetensors").exists()
    assert (clone / "report/index.html").exists()
    assert (clone / "book.html").exists()
    assert (clone / "build/demo").is_dir()


@pytest.mark.slow
def test_a_wheel_without_the_repository(tmp_path):
    """pip installs the wheel in place of the folder, and the first commands run.

    The others, which the test above runs, find what they find there, since the wheel has every file of the package.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", "sympow"], cwd=ROOT / "src", check=True, capture_output=True, text=True)
    assert set(listed.stdout.splitlines()) <= set(zipfile.ZipFile(wheel).namelist())
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    environment = tmp_path / "environment"
    make_environment(environment)
    commands = [c.replace("'.[", f"'./{wheel.name}[") for c in readme.shell_commands() if not c.startswith("make")]
    type_in(tmp_path, [*commands[: commands.index("sympow train") + 1], "sympow report runs/ -o report"], environment)
    assert (tmp_path / "report/index.html").exists()


def make_environment(folder: Path) -> None:
    """A virtual environment with links to the dependencies of this one: to install them once more takes minutes."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (folder / "dependencies").mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        # Without this package: pip does not install a wheel of a version that is there.
        if "sympow" not in package.name:
            (folder / "dependencies" / package.name).symlink_to(package)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(str(folder / "dependencies"))


def type_in(folder: Path, commands: list[str], environment: Path) -> None:
    """Runs commands in a folder with some books, as a shell does in which a virtual environment is active."""
    for n, name in enumerate(TEXTS):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(
            "".join(f"The king had {n * m} daughters, and chapter {m} ends. " for m in range(300))
        )
    # Without this test's packages and settings.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON", "TRITON"))}
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept |= {"PATH": path, "VIRTUAL_ENV": str(environment), "OMP_NUM_THREADS": "1"}
    for command in commands:
        ran = subprocess.run(
            ["bash", "-c", small(command)],
            cwd=folder,
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, f"{small(command)}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        assert "Traceback" not in ran.stderr, f"{small(command)}\n{ran.stderr[-3000:]}"
