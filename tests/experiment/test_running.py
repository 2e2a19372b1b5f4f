"""Running experiments: results of what was trained, nothing twice, and going on after an interruption."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from statistics import fmean

import pytest
from experiment_settings import TINY
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.experiment import finding
from sympow.experiment.results import result_of
from sympow.experiment.worker import STOPPED, Order, give_order, work
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics

# As much patience as a busy machine may need. No test expects this to pass.
PATIENCE = 120.0


def order(run, results, **changes):
    given = {
        "run": run.name,
        "variant": run.variant,
        "changes": run.changes,
        "evaluation": run.evaluation,
        "results": str(results),
        "command": "some command",
        "device": "cpu",
        "jobs": 1,
        "keep_checkpoints": False,
    }
    return Order(**{**given, **changes})


def command(folder, tmp_path, *arguments):
    settings = [flag for name, value in TINY.items() if name != "context" for flag in ("--set", f"{name}={value}")]
    where = ["--folder", folder, "--out", tmp_path / "runs", "--results", tmp_path / "results", "--device", "cpu"]
    result = CliRunner().invoke(app, ["experiment", *map(str, [*arguments, *where]), *settings])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_an_experiment_from_its_name_to_its_summary(folder, tmp_path):
    code, output = command(folder, tmp_path, "pair", "--jobs", 2)
    assert code == 0, output
    results = tmp_path / "results"
    rows = json.loads((results / "pair" / "summary.json").read_text())["runs"]
    assert [row["variant"] for row in rows] == ["gating", "conformal"]
    for row in rows:
        there, kept = tmp_path / "runs" / row["run"], results / "runs" / row["run"]
        losses = [line["loss"] for line in read_metrics(there / "metrics.jsonl")]
        assert len(losses) == row["steps"] == 20
        assert row["final_loss"] == pytest.approx(fmean(losses[-2:]), abs=1e-4)
        assert row["tokens"] == 20 * 64
        assert (row["status"], row["jobs"], row["device"]) == ("done", 2, "cpu")
        assert f"--only {row['run']}" in row["command"]
        assert "--set steps=20" in row["command"]
        # Everything that figures are drawn from, and nothing large.
        assert {path.name for path in kept.iterdir()} == {
            "config.yaml", "evaluation.json", "heads.json", "metrics.jsonl", "result.json"
        }  # fmt: skip
        assert TrainConfig.read(kept / "config.yaml") == TrainConfig.read(there / "config.yaml")
        assert list(row["by_context"]) == ["1", "2", "4", "8", "16", "32", "64"]
        assert (there / "model" / "model.safetensors").is_file()
        assert not (there / "checkpoints").exists()
    with (results / "pair" / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["final_loss"]) for line in table] == [row["final_loss"] for row in rows]
    assert float(table[1]["heldout_loss_within_64"]) == rows[1]["by_context"]["64"]

    # Once more: nothing is left to do, and nothing is done.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    code, output = command(folder, tmp_path, "pair", "--only", "conformal*")
    assert code == 0, output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    # The summary is of the whole experiment still.
    assert len(json.loads((results / "pair" / "summary.json").read_text())["runs"]) == 2
    code, output = command(folder, tmp_path, "pair", "--plan", "--minutes", 5)
    assert code == 0
    assert "0 of 2 runs to do" in output

    # Other settings are another experiment.
    code, output = command(folder, tmp_path, "pair", "--set", "learning_rate=1e-4")
    assert code == 2
    assert "is of another config: learning_rate 0.003 and 0.0001" in output


def test_a_run_that_is_stopped_goes_on_where_it_was(scale, tmp_path):
    """As if nothing had happened: the same losses as a run that was never stopped."""
    run = scale.changed(steps=60).run("conformal", context=32)
    for name in ("stopped", "whole"):
        give_order(tmp_path / name, run, order(run, tmp_path / f"{name}-results"))
    process = subprocess.Popen(
        [sys.executable, "-m", "sympow.experiment.worker", str(tmp_path / "stopped")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    metrics, end = tmp_path / "stopped" / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    code = process.wait(PATIENCE)
    if code == 0:  # it was faster
        assert result_of(run, tmp_path / "stopped-results") is not None
    else:
        assert code == STOPPED
        assert result_of(run, tmp_path / "stopped-results") is None
        assert 3 <= len(read_metrics(metrics)) < 60
        assert work(tmp_path / "stopped")
    assert work(tmp_path / "whole")
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("stopped", "whole")
    ]
    assert losses[0] == losses[1]
    rows = [result_of(run, tmp_path / f"{name}-results") for name in ("stopped", "whole")]
    assert [row["sittings"] for row in rows] == [1 if code == 0 else 2, 1]
    same = ("final_loss", "heldout_loss", "by_context", "recall", "passkey")
    assert [rows[0][name] for name in same] == [rows[1][name] for name in same]
    assert rows[1]["recall"][0]["pairs"] == 2
    assert rows[1]["passkey"][0]["distance"] == 16


def test_a_run_that_diverges_is_a_result(scale, tmp_path):
    run = scale.run("gating", context=32, learning_rate=1e30)
    give_order(tmp_path / "run", run, order(run, tmp_path / "results"))
    assert work(tmp_path / "run")
    row = result_of(run, tmp_path / "results")
    assert row["status"] == "diverged"
    assert row["final_loss"] is None
    assert "not finite" in row["problem"].lower()


def test_nothing_is_started_that_will_not_end_in_time(folder, tmp_path):
    code, output = command(folder, tmp_path, "pair", "--minutes", 0.01)
    assert code == 0, output
    assert "2 of 2 runs are left" in output
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_is_named_with_its_log(folder, tmp_path):
    code, output = command(folder, tmp_path, "pair", "--only", "gating*", "--data", "nowhere")
    assert code == 1
    (log,) = (tmp_path / "runs").glob("gating*/log.txt")
    assert f"failed; see {log}" in output
    assert "source must be" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "experiment must be one of 'pair'; got 'nothing'"),
        (("pair", "--scale", "huge"), "scale must be one of 'cpu', 'small', 'paper'; got 'huge'"),
        (("pair", "--only", "none*"), "only must match some of gating_p2_c32_s0, conformal_p2_c32_s0; got none*"),
        (("pair", "--set", "nonsense"), "set must be NAME=VALUE, got 'nonsense'"),
        (("pair", "--set", "speed=1"), "no section of a TrainConfig has a field 'speed'"),
        (("pair", "--jobs", 0), "jobs must be at least 1, got 0"),
        (("pair", "--minutes", 0), "minutes must be above 0, got 0"),
        (("pair", "--scale", "paper", "--jobs", 2), "jobs must be 1 at scale 'paper', whose runs take 8 GPUs each"),
    ],
)
def test_mistakes_are_named(folder, tmp_path, arguments, message):
    code, output = command(folder, tmp_path, *arguments)
    assert code == 2
    assert message in output


def test_an_installed_package_says_where_experiments_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finding, "__file__", str(tmp_path / "lib" / "site-packages" / "sympow" / "experiment" / "x.py"))
    result = CliRunner().invoke(app, ["experiment"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "Error: there is no folder experiments/ here." in said
    assert "clone it and run this command in it, or name a folder of your own with --folder" in said


def test_without_a_name_experiments_are_listed(folder, tmp_path):
    code, output = command(folder, tmp_path)
    assert code == 0
    assert output == "pair Two runs."
