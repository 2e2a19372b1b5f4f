"""Running experiments: results are stored as tables, finished runs are skipped, interrupted runs are resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from statistics import fmean

import pytest
from experiment_settings import TINY
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.experiments import grid
from sympow.experiments.store import Store, read_results, read_rows, read_table, write_result
from sympow.experiments.worker import STOPPED, JobSpec, work, write_job
from sympow.report.run_collection import collect
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics

# Time limit in seconds for a loaded machine; no test waits this long otherwise.
PATIENCE = 120.0


def job(run, **changes):
    given = {
        "run": run.name,
        "variant": run.variant,
        "changes": run.changes,
        "evaluation": run.evaluation,
        "command": "some command",
        "device": "cpu",
        "jobs": 1,
        "keep_checkpoints": False,
    }
    return JobSpec(**{**given, **changes})


def row_of(run, out):
    return Store(out / "results", out).row(run)


def command(folder, tmp_path, *arguments):
    settings = [flag for name, value in TINY.items() if name != "context" for flag in ("--set", f"{name}={value}")]
    where = ["--folder", folder, "--out", tmp_path / "runs", "--results", tmp_path / "results", "--device", "cpu"]
    result = CliRunner().invoke(app, ["experiment", *map(str, [*arguments, *where]), *settings])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


GROWING = """
    def growing(scale):
        '''The better of two rates, on another seed.'''
        rates = [scale.run("gating", context=32, learning_rate=rate) for rate in (0.1, 0.2)]
        best = scale.best(rates)
        return rates if best is None else [*rates, scale.run("gating", context=32, seed=1, **best.changes)]
"""


def test_a_grid_grows_by_its_results(folder, tmp_path, monkeypatch):
    """Within one command, and where the results are there already; runs are stood in for by made-up results."""
    (folder / "more.py").write_text(textwrap.dedent(GROWING))

    def start(run, scale, config, index):
        loss = 1 - run.config.optimizer.learning_rate
        numbers = {"status": "done", "final_loss": loss, "heldout_loss": loss, "total_seconds": 1, "tokens": run.tokens}
        about = {"run": run.name, "variant": run.variant, "power": 2, "context": 32, "seed": run.config.run.seed}
        others = {"device": "cpu", "changes": run.changes, "config": asdict(run.config)}
        (config.out / run.name).mkdir(parents=True)
        write_result(config.out / run.name, {**about, **numbers, **others}, {"metrics": {}})
        return subprocess.Popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr("sympow.experiments.runner._start", start)
    monkeypatch.setattr("sympow.experiments.runner.POLL_SECONDS", 0.01)
    names = [f"gating_p2_c32_learning_rate-{end}" for end in ("0.1_s0", "0.2_s0", "0.2_s1")]
    code, output = command(folder, tmp_path, "growing", "--plan")
    assert code == 0, output
    assert "2 of 2 runs to do" in output
    code, output = command(folder, tmp_path, "growing", "--only", "*_s1")
    assert code != 0, "the third run is not known yet"
    code, output = command(folder, tmp_path, "growing", "--jobs", 2)
    assert code == 0, output
    assert "1 runs more, 0 of them done" in output
    assert "(3 of 3)" in output
    assert [row["run"] for row in read_rows(tmp_path / "results" / "growing.jsonl")] == names
    code, output = command(folder, tmp_path, "growing", "--only", "*_s1")
    assert "1 runs, 1 of them done" in output


@pytest.mark.slow
def test_an_experiment_from_its_name_to_its_summary(folder, tmp_path):
    code, output = command(folder, tmp_path, "pair", "--jobs", 2)
    assert code == 0, output
    results = tmp_path / "results"
    # A table and its curves, and nothing else.
    assert sorted(path.name for path in results.iterdir()) == ["pair.curves.jsonl", "pair.jsonl"]
    stored = read_table(results / "pair.jsonl")
    rows = [run.row for run in stored]
    assert [row["variant"] for row in rows] == ["gating", "conformal"]
    for run, row in zip(stored, rows, strict=True):
        there = tmp_path / "runs" / row["run"]
        losses = [line["loss"] for line in read_metrics(there / "metrics.jsonl")]
        assert len(losses) == row["steps"] == 20
        assert row["final_loss"] == pytest.approx(fmean(losses[-2:]), abs=1e-4)
        assert row["tokens"] == 20 * 64
        assert (row["status"], row["jobs"], row["device"]) == ("done", 2, "cpu")
        assert f"--only {row['run']}" in row["command"]
        assert "--set steps=20" in row["command"]
        assert TrainConfig.from_yaml(json.dumps(row["config"])) == TrainConfig.read(there / "config.yaml")
        # Everything that figures use, equal to the content of the run's folder.
        (of_folder,), (of_table,) = (
            [one for one in collect([path]).runs if one.name.endswith(row["run"])] for path in (there, results)
        )
        assert of_table.settings == of_folder.settings
        assert of_table.heads == of_folder.heads is not None
        assert of_table.evaluation.by_context == pytest.approx(of_folder.evaluation.by_context, abs=1e-4)
        assert of_table.evaluation.documents == of_folder.evaluation.documents == 2
        assert [line["loss"] for line in run.metrics] == pytest.approx(losses, rel=1e-5)
        assert list(row["by_context"]) == ["1", "2", "4", "8", "16", "32", "64"]
        assert (there / "model" / "model.safetensors").is_file()
        assert not (there / "checkpoints").exists()

    # The same command again changes nothing.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    lines = [path.read_bytes() for path in sorted(results.iterdir())]
    code, output = command(folder, tmp_path, "pair", "--only", "conformal*")
    assert code == 0, output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    # The table still has the whole experiment, taken from the earlier table or else from the runs' folders.
    assert [path.read_bytes() for path in sorted(results.iterdir())] == lines
    for path in results.iterdir():
        path.unlink()
    code, output = command(folder, tmp_path, "pair", "--only", "conformal*")
    assert code == 0, output
    assert [path.read_bytes() for path in sorted(results.iterdir())] == lines
    # Without the runs' folders, the table is enough.
    shutil.rmtree(tmp_path / "runs")
    code, output = command(folder, tmp_path, "pair", "--plan", "--minutes", 5)
    assert code == 0
    assert "0 of 2 runs to do" in output

    # Other settings are another experiment.
    code, output = command(folder, tmp_path, "pair", "--set", "learning_rate=1e-4")
    assert code == 2
    assert "is of another config: learning_rate 0.003 and 0.0001" in output


def start_worker(folder):
    # In processes of their own, of one thread each: what a process did before can change how products round.
    return subprocess.Popen(
        [sys.executable, "-m", "sympow.experiments.worker", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_where_it_was(scale, tmp_path):
    """The resumed run has the same losses as a run that was never stopped."""
    run = scale.changed(steps=60).run("conformal", context=32)
    for name in ("stopped", "whole"):
        write_job(tmp_path / name / run.name, run, job(run))
    process = start_worker(tmp_path / "stopped" / run.name)
    metrics, end = tmp_path / "stopped" / run.name / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    code = process.wait(PATIENCE)
    if code == 0:  # it was faster
        assert row_of(run, tmp_path / "stopped") is not None
    else:
        assert code == STOPPED
        assert row_of(run, tmp_path / "stopped") is None
        assert 3 <= len(read_metrics(metrics)) < 60
        assert start_worker(tmp_path / "stopped" / run.name).wait(PATIENCE) == 0
    assert start_worker(tmp_path / "whole" / run.name).wait(PATIENCE) == 0
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / run.name / "metrics.jsonl")]
        for name in ("stopped", "whole")
    ]
    assert losses[0] == losses[1]
    rows = [row_of(run, tmp_path / name) for name in ("stopped", "whole")]
    assert [row["sittings"] for row in rows] == [1 if code == 0 else 2, 1]
    same = ("final_loss", "heldout_loss", "by_context", "recall", "passkey")
    assert [rows[0][name] for name in same] == [rows[1][name] for name in same]
    assert rows[1]["recall"][0]["pairs"] == 2
    assert rows[1]["passkey"][0]["distance"] == 16


def test_a_run_that_diverges_is_a_result(scale, tmp_path):
    run = scale.run("gating", context=32, learning_rate=1e30)
    write_job(tmp_path / run.name, run, job(run))
    assert work(tmp_path / run.name)
    store = Store(tmp_path / "results", tmp_path)
    row = store.row(run)
    assert row["status"] == "diverged"
    assert row["final_loss"] is None
    assert "not finite" in row["problem"].lower()
    (table, _) = store.write("one", [run])
    assert [stored.evaluation for stored in read_table(table)] == [None]


def made_up(run, **changes):
    """A result as version 0.1 stored it, with separate files for each run."""
    row = {"run": run.name, "status": "done", "final_loss": 2.5, "by_context": {"1": 3.0}, "by_position": {"8.7": 2.0}}
    evaluation = {"documents": 2, "trained_at": 32, "by_context": {"1": 3.0}, "by_position": {"8.7": 2.0}}
    facts = {"command": "a command", "data": "stdlib", "device": "cpu", "dtype": "float32", "environment": {}}
    heads = {"tokens": 64, "data": "stdlib", "quantities": {"half_life": [[3.0, None]]}}
    return {
        "config.yaml": run.config.to_yaml(),
        "metrics.jsonl": '{"step": 2, "loss": 3.0}\n{"step": 4, "loss": 2.5, "half_life/layer_0": 7}\n',
        "evaluation.json": json.dumps({**facts, "models": {run.name: evaluation}}),
        "heads.json": json.dumps(heads),
        "result.json": json.dumps({**row, **changes}),
    }


def test_results_of_version_0_1_are_read_and_become_a_table(scale, tmp_path):
    run = scale.run("gating", context=32)
    for name, content in made_up(run).items():
        path = tmp_path / "results" / "runs" / run.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (before,) = collect([tmp_path / "results"]).runs
    store = Store(tmp_path / "results", tmp_path / "out")
    assert store.state(run) == "done"
    store.write("one", [run])
    shutil.rmtree(tmp_path / "results" / "runs")
    (after,) = collect([tmp_path / "results"]).runs
    for name in ("name", "settings", "metrics", "evaluation", "heads", "final_loss"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.metrics == [{"step": 2, "loss": 3.0}, {"step": 4, "loss": 2.5, "half_life/layer_0": 7}]
    assert Store(tmp_path / "results", tmp_path / "out").row(run)["final_loss"] == 2.5


def test_a_table_keeps_runs_that_the_grid_does_not_have_now(scale, tmp_path):
    """A grid that grows has no runs that depend on a result which is missing; their folders may be gone."""
    runs = [scale.run("gating", context=32, seed=seed) for seed in range(3)]
    for run in runs:
        for name, content in made_up(run).items():
            path = tmp_path / "out" / run.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    Store(tmp_path, tmp_path / "out").write("one", runs)
    shutil.rmtree(tmp_path / "out")
    Store(tmp_path, tmp_path / "out").write("one", runs[1:2])
    assert [run.name for run in read_table(tmp_path / "one.jsonl")] == [runs[n].name for n in (1, 0, 2)]


def test_tables_that_disagree_are_refused(scale, tmp_path):
    run = scale.run("gating", context=32)
    for table, loss in (("one", 2.5), ("another", 2.25)):
        for name, content in made_up(run, final_loss=loss).items():
            path = tmp_path / table / run.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        Store(tmp_path / table, tmp_path / table).write(table, [run])
        for path in (tmp_path / table).glob("*.jsonl"):
            path.rename(tmp_path / path.name)
    with pytest.raises(ValueError, match=rf"another.jsonl and .*one.jsonl have different results of {run.name}"):
        read_results(tmp_path)
    assert [row["final_loss"] for row in read_rows(tmp_path / "one.jsonl")] == [2.5]


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
    monkeypatch.setattr(grid, "__file__", str(tmp_path / "lib" / "site-packages" / "sympow" / "experiments" / "x.py"))
    result = CliRunner().invoke(app, ["experiment"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "Error: there is no folder experiments/ here." in said
    assert "clone it and run this command in it, or name a folder of your own with --folder" in said


def test_without_a_name_experiments_are_listed(folder, tmp_path):
    code, output = command(folder, tmp_path)
    assert code == 0
    assert output == "pair Two runs."
