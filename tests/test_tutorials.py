"""The tutorials of docs/tutorials run: every code block, in order, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import readme

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Runs a tutorial and returns the names that its Python blocks define; `output`: what its commands printed."""
    monkeypatch.chdir(tmp_path)
    # The command of this checkout, as an installation would put it on the path.
    programs = tmp_path / ".programs"
    programs.mkdir()
    for name, arguments in (("sympow", "-m sympow"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }

    def run(name):
        names = {"output": ""}
        for block in readme.blocks((TUTORIALS / name).read_text("utf-8")):
            if block.language == "python":
                exec(compile(block.text, name, "exec"), names)
            elif block.language == "":
                for command in block.commands:
                    names["output"] += shell(command, environment)
        return names

    return run


def shell(command, environment):
    done = subprocess.run(
        ["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, f"{command}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def test_every_tutorial_has_a_test():
    source = Path(__file__).read_text("utf-8")
    assert [path.name for path in TUTORIALS.glob("*.md") if f'follow("{path.name}")' not in source] == []


@pytest.mark.slow
def test_the_layer_in_your_model(follow):
    names = follow("layer_in_your_model.md")
    assert names["losses"][0] > 5
    assert sum(names["losses"][-10:]) / 10 < 2.6
    assert names["generated"].shape == (1, 50)
    assert names["after_short"] == names["after_long"] > 0
    assert names["difference"] < 1e-3


@pytest.mark.slow
def test_train_on_your_text(follow, tmp_path):
    names = follow("train_on_your_text.md")
    assert names["losses"][0] > 4
    assert sum(names["losses"][-10:]) / 10 < 3.4
    assert (tmp_path / "runs/first/model/model.safetensors").exists()
    assert (tmp_path / "runs/first/evaluation.json").exists()
    assert "The import statement" in names["output"]
    assert (tmp_path / "report/index.html").exists()


@pytest.mark.slow
def test_a_long_book(follow):
    names = follow("long_book.md")
    assert names["book"].tokens > 60_000
    assert names["beginning"].nbytes == names["book"].nbytes
    smaller, larger = sorted(names["sizes"])
    assert larger - smaller < 1_000
    assert names["output"].count("What is a") == 2
    assert len(names["answers"]) == len(names["together"]) == 2
    assert len(names["drafts"]) == 3
