"""`make demo` at a tiny size: the files that it writes, and the commands that it suggests next."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.report.run_collection import collect

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "demo.py"
MODELS = ("softmax", "conformal")
# As for a user: OMP_NUM_THREADS of the tests is not passed on.
UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a finished demo, and its output."""
    pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")
    out = tmp_path_factory.mktemp("a folder") / "demo"
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--out", str(out)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return out, done.stdout


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
        assert run.evaluation.length == 8 * run.settings["context"]
        assert run.evaluation.by_position


def test_no_command_starts_a_pool_of_threads(demo):
    out, _ = demo
    assert json.loads((out / "evaluation" / "evaluation.json").read_text())["environment"]["threads"] == 1


def test_the_report_shows_both_models_and_their_evaluations(demo):
    out, _ = demo
    page = (out / "report" / "index.html").read_text("utf-8")
    data = json.loads(re.search(r'<script [^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert [series["label"] for series in data["series"]] == list(MODELS)
    assert all(run["evaluation"]["byPosition"] for run in data["runs"])
    assert data["notes"] == []
    assert list((out / "report" / "figures").glob("loss_by_evaluation_context*.png"))


def test_printed_addresses_are_of_files_that_were_written(demo):
    out, output = demo
    addresses = [Path(unquote(urlsplit(line).path)) for line in output.splitlines() if line.startswith("file://")]
    expected = ["report/index.html", "inspect.html", "evaluation/loss_by_context.png"]
    assert addresses == [(out / name).resolve() for name in expected]
    assert all(path.is_file() for path in addresses)


def test_printed_losses_are_means_over_the_evaluated_positions(demo):
    out, output = demo
    models = json.loads((out / "evaluation" / "evaluation.json").read_text())["models"]
    assert list(models) == list(MODELS)
    rows = re.findall(r"^([\d,]+) to ([\d,]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert [row[:2] for row in rows] == [("64", "128"), ("128", "256"), ("512", "1,024")]
    for first, last, *losses in rows:
        start, stop = (int(number.replace(",", "")) for number in (first, last))
        means = [sum(model["mean"][start:stop]) / (stop - start) for model in models.values()]
        assert [float(loss) for loss in losses] == pytest.approx(means, abs=1e-3)


def test_training_prints_both_models_steps_and_losses(demo):
    _, output = demo
    last = re.findall(r"^\d+:\d\d +(\d+) of (\d+) +([\d.]+) +(\d+) of (\d+) +([\d.]+)$", output, re.MULTILINE)[-1]
    assert last[0] == last[1] == last[3] == last[4]


def test_the_demo_goes_through_the_commands_of_the_readme(demo):
    _, output = demo
    names = [arguments[0] for _, arguments in commands_in(output)]
    ran, suggested = names[:7], names[7:]
    assert ran == ["data", "train", "train", "evaluate", "generate", "report", "inspect"]
    assert suggested == ["generate", "train", "evaluate"]


def test_suggested_commands_work_as_printed(demo):
    _, output = demo
    for program, arguments in commands_in(output.partition("Next steps:")[2]):
        if " -m " not in program:
            found = subprocess.run(["/bin/sh", "-c", f"command -v {program}"], cwd=ROOT, check=False)
            assert found.returncode == 0, f"{program} is not found by a shell"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{arguments}: {result.output}"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # `dataclass` looks up the module in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_folder_of_the_users_is_refused_and_left_as_it_is(script, tmp_path):
    kept = tmp_path / "runs" / "mine" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(SystemExit, match="--out must be a new folder"):
        script.make_folder(tmp_path)
    assert kept.read_text() == "mine"


def test_the_folder_of_an_earlier_demo_is_replaced(script, tmp_path):
    out = tmp_path / "demo"
    script.make_folder(out)
    (out / "data").mkdir()
    script.make_folder(out)
    assert not (out / "data").exists()


def test_a_training_that_fails_ends_the_demo_with_its_message(script, tmp_path):
    endless = {"steps": 10**9, "data": "stdlib"}
    wrong = {"steps": 1, "power": 3}
    with pytest.raises(SystemExit, match=r"the training of conformal failed with code 2:\n(.|\n)*power must be even"):
        script.train_all({"softmax": endless, "conformal": wrong}, tmp_path / "runs")
