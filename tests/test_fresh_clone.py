"""What a new user does: a clone with an environment of its own, `make demo` and README's commands there; a wheel.

`SMALL` adds flags to commands that would otherwise take minutes.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import readme
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.report.run_collection import collect

pytestmark = pytest.mark.slow
ROOT = readme.README.parent
MODELS = ("softmax", "sympow")
SMALL_RUN = "--steps 2 --layers 1 --width 16 --heads 2 --batch-tokens 512 --no-tensorboard"
# Flags added to a command, by its first words; the longest match counts.
SMALL = {
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


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = tmp_path_factory.mktemp("new") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    make_environment(clone / ".venv")
    return clone


@pytest.fixture(scope="module")
def demo(clone) -> tuple[Path, str]:
    """The folder of a finished demo, and its output."""
    pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")
    # Without the number of threads that the tests set, as for a user.
    output = type_in(clone, "make demo ARGS=\"--seconds 30 --out 'a folder/demo'\"", clone / ".venv", threads=None)
    return clone / "a folder" / "demo", output


def commands_in(output: str) -> list[tuple[str, list[str]]]:
    """Program and arguments of every command of sympow that was printed."""
    lines = re.sub(r" \\\n +", " ", output).splitlines()
    found = (re.fullmatch(r"(?:\$ )?(\S+/sympow|sympow|\S+ -m sympow) ((?:data|[a-z]+) .*)", line) for line in lines)
    return [(match[1], shlex.split(match[2])) for match in found if match]


def test_every_run_has_its_evaluation_beyond_the_training_context(demo):
    out, _ = demo
    runs = {run.name: run for run in collect([out]).runs}
    assert set(runs) == set(MODELS)
    for run in runs.values():
        assert run.finished
        assert run.final_heldout_loss is not None
        assert run.evaluation is not None
        assert run.evaluation.length == 16 * run.settings["context"]
        assert run.evaluation.by_position


def test_the_report_shows_both_models_and_their_evaluations(demo):
    out, _ = demo
    page = (out / "report" / "index.html").read_text("utf-8")
    data = json.loads(re.search(r'<script [^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert [series["label"] for series in data["series"]] == ["softmax", "sympow + gating"]
    panels = data["views"]["beyond"]["by_position"]["panels"]
    lines = [line for panel in panels for line in panel["lines"]]
    assert [line["series"] for line in lines] == [0, 1]
    assert all(len(curve["y"]) > 1 for line in lines for seeds in line["configs"] for curve in seeds)
    # Notes say what is missing.
    assert 'id="notes"' not in page
    assert list((out / "report" / "figures").glob("loss_by_evaluation_context*.png"))


def test_printed_addresses_are_of_files_that_were_written(demo):
    out, output = demo
    addresses = [Path(unquote(urlsplit(line).path)) for line in output.splitlines() if line.startswith("file://")]
    expected = ["evaluation/loss_by_context.png", "report/index.html"]
    assert addresses == [(out / name).resolve() for name in expected]
    assert all(path.is_file() for path in addresses)


def test_printed_losses_are_averages_within_contexts(demo):
    out, output = demo
    models = json.loads((out / "evaluation" / "evaluation.json").read_text())["models"]
    contexts = [
        int(word.replace(",", "")) for word in re.search(r"^in the first +([\d, ]+) tokens$", output, re.M)[1].split()
    ]
    assert contexts == [64, 128, 256, 512, 1_024]
    for name in MODELS:
        losses = [float(word) for word in re.search(rf"^{name} +([\d. ]+)$", output, re.M)[1].split()]
        means = [sum(models[name]["mean"][:context]) / context for context in contexts]
        assert losses == pytest.approx(means, abs=1e-3)


def test_both_models_see_the_same_number_of_batches(demo):
    out, output = demo
    steps = int(re.search(r"^Both saw ([\d,]+) batches", output, re.M)[1].replace(",", ""))
    runs = collect([out]).runs
    assert [run.settings["steps"] for run in runs] == [steps, steps]
    assert len({(run.settings["batch_tokens"], run.settings["learning_rate"]) for run in runs}) == 1


def test_a_state_does_not_grow_and_a_cache_does(demo):
    _, output = demo
    rows = re.findall(r"^ *([\d,]+) tokens +[\d.]+ ms, (\S+ \wB) +[\d.]+ ms, (\S+ \wB)$", output, re.M)
    lengths, caches, states = zip(*rows, strict=True)
    assert lengths == ("1,000", "10,000", "100,000")
    assert len(set(caches)) == 3
    assert len(set(states)) == 1


def test_suggested_commands_work_as_printed(demo, clone, monkeypatch):
    _, output = demo
    monkeypatch.chdir(clone)
    for program, arguments in commands_in(output.partition("Try next:")[2]):
        assert type_in(clone, f"command -v {program}", clone / ".venv")
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{arguments}: {result.output}"


def test_every_command_of_a_first_project(clone, demo):
    commands = readme.shell_commands(readme.pages(readme.FIRST_PROJECT))
    assert all(any(command.startswith(beginning) for command in commands) for beginning in SMALL)
    write_books(clone)
    for command in commands:
        # `demo` ran that one.
        if command != "make demo":
            type_in(clone, small(command), clone / ".venv")
    assert (clone / "runs/first/model/model.safetensors").exists()
    assert (clone / "report/index.html").exists()
    assert (clone / "book.html").exists()


def test_a_wheel_without_the_repository(tmp_path):
    """pip installs the wheel in place of the folder, and a model is trained and its report written.

    The other commands, which the test above runs, find what they find there, since the wheel has every file of the
    package.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", "sympow"], cwd=ROOT / "src", check=True, capture_output=True, text=True)
    assert set(listed.stdout.splitlines()) <= set(zipfile.ZipFile(wheel).namelist())
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    environment = tmp_path / "environment"
    make_environment(environment)
    (install,) = (command for command in readme.shell_commands() if command.startswith("pip install"))
    commands = (install.replace("'.[", f"'./{wheel.name}["), small("sympow train"), "sympow report runs/ -o report")
    write_books(tmp_path)
    for command in commands:
        type_in(tmp_path, command, environment)
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


def write_books(folder: Path) -> None:
    """The texts that README's commands are about."""
    for n, name in enumerate(TEXTS):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(
            "".join(f"The king had {n * m} daughters, and chapter {m} ends. " for m in range(300))
        )


def type_in(folder: Path, command: str, environment: Path, threads: str | None = "1") -> str:
    """What a command prints in a shell in which a virtual environment is active.

    Args:
        threads: OMP_NUM_THREADS; None: unset.
    """
    # Without this test's packages and settings.
    ours = ("PYTEST", "PYTHON", "TRITON", "OMP_", "MKL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    kept |= {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(environment)}
    kept |= {"OMP_NUM_THREADS": threads} if threads else {}
    ran = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    assert "Traceback" not in ran.stderr, f"{command}\n{ran.stderr[-3000:]}"
    return ran.stdout
