"""Running experiments: results are stored as tables, finished runs are skipped, interrupted runs are resumed."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from statistics import fmean

import pytest
import torch
from experiment_settings import TINY
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.experiments import grid, runner
from sympow.experiments.console import print_rows
from sympow.experiments.runner import RunnerConfig, run_all
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


def command(folder, tmp_path, *arguments, device="cpu"):
    settings = [flag for name, value in TINY.items() if name != "context" for flag in ("--set", f"{name}={value}")]
    where = ["--folder", folder, "--out", tmp_path / "runs", "--results", tmp_path / "results"]
    where += [] if device is None else ["--device", device]
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


def test_a_table_keeps_runs_that_the_grid_does_not_have_now(scale, tmp_path):
    """A grid that grows has no runs that depend on a result which is missing; their folders may be gone."""
    runs = [scale.run("gating", context=32, seed=seed) for seed in range(3)]
    for run in runs:
        put(run, tmp_path / "out")
    Store(tmp_path, tmp_path / "out").write("one", runs)
    shutil.rmtree(tmp_path / "out")
    Store(tmp_path, tmp_path / "out").write("one", runs[1:2])
    assert [run.name for run in read_table(tmp_path / "one.jsonl")] == [runs[n].name for n in (1, 0, 2)]


def put(run, out, loss=1.0, **numbers):
    """Writes a made-up result of a run into its folder."""
    row = {"run": run.name, "variant": run.variant, "status": "done", "final_loss": loss, "heldout_loss": loss}
    about = {"changes": run.changes, "config": asdict(run.config), "total_seconds": 1, **numbers}
    (out / run.name).mkdir(parents=True, exist_ok=True)
    write_result(out / run.name, {**row, **about}, {"metrics": {}})


def test_a_run_that_was_evaluated_otherwise_is_not_taken_for_this_one(scale, tmp_path):
    run = scale.run("gating", context=32)
    put(run, tmp_path, evaluation_settings=json.loads(json.dumps(asdict(run.evaluation))))
    store = Store(tmp_path / "results", tmp_path)
    assert store.state(run) == "done"
    other = replace(run, evaluation=replace(run.evaluation, documents=77, pairs=(4,)))
    message = rf"{run.name} in .* is of another config: Evaluation\(.*\) and Evaluation\(.*documents=77, pairs=\(4,\)"
    with pytest.raises(ValueError, match=message):
        store.state(other)
    # Rows of earlier versions do not say how a run was evaluated.
    put(run, tmp_path)
    assert Store(tmp_path / "results", tmp_path).state(other) == "done"


@pytest.mark.parametrize("of_other", [{0}, {1}], ids=["not of the grid", "of the grid"])
def test_a_table_keeps_what_another_command_has_added(scale, tmp_path, of_other):
    """Of which this command knows nothing: a grid that has grown since, or another folder of runs."""
    runs = [scale.run("gating", context=32, seed=seed) for seed in range(2)]
    one, other = (Store(tmp_path / "results", tmp_path / name) for name in ("one", "other"))
    put(runs[0], tmp_path / "one")
    put(runs[1], tmp_path / "other", loss=2.0)
    other.write("mine", runs)
    assert one.state(runs[1]) == "new"
    (table, _) = one.write("mine", runs[:1] if of_other == {0} else runs)
    assert [(run.name, run.row["final_loss"]) for run in read_table(table)] == [(runs[0].name, 1), (runs[1].name, 2)]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["mine.curves.jsonl", "mine.jsonl"]


def test_a_run_that_was_begun_with_other_settings_is_refused(folder, scale, tmp_path):
    settings = {name: value for name, value in TINY.items() if name != "context"}
    (run,) = (run for run in runs_of_pair(folder, settings) if run.variant == "gating")
    begun = tmp_path / "runs" / run.name
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text(run.config.changed(learning_rate=0.5, vocab_size=300, save_every=7).to_yaml())
    for plan in ([], ["--plan"]):
        code, output = command(folder, tmp_path, "pair", *plan)
        assert code == 2
        assert "is of another config: learning_rate 0.5 and 0.003. Choose other folders" in output
    assert [path.name for path in begun.iterdir()] == ["config.yaml"]
    (begun / "config.yaml").write_text(run.config.changed(vocab_size=300, save_every=7).to_yaml())
    assert Store(tmp_path / "results", tmp_path / "runs").state(run) == "begun"


def runs_of_pair(folder, settings):
    return grid.runs_of(grid.find_experiments(folder)["pair"], grid.cpu().changed(**settings))


def test_tables_that_disagree_are_refused(scale, tmp_path):
    run = scale.run("gating", context=32)
    for table, loss in (("one", 2.5), ("another", 2.25)):
        put(run, tmp_path / table, loss)
        Store(tmp_path / table, tmp_path / table).write(table, [run])
        for path in (tmp_path / table).glob("*.jsonl"):
            path.rename(tmp_path / path.name)
    with pytest.raises(ValueError, match=rf"another.jsonl and .*one.jsonl have different results of {run.name}"):
        read_results(tmp_path)
    assert [row["final_loss"] for row in read_rows(tmp_path / "one.jsonl")] == [2.5]


class Silent:
    """A display that keeps what was started, and whether it was resumed."""

    def __init__(self):
        self.runs = []

    def started(self, run, seconds, resumed):
        self.runs.append((run.name, resumed))

    def __getattr__(self, name):
        return lambda *_: None


def sleeping(run, scale, config, index):
    """In the place of `_start`: a run that writes its config and never ends."""
    (config.out / run.name).mkdir(parents=True, exist_ok=True)
    (config.out / run.name / "config.yaml").write_text(run.config.to_yaml())
    return subprocess.Popen(["sleep", "100"], start_new_session=True)


def test_a_run_longer_than_any_limit_is_begun_and_resumed_by_the_next_command(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_start", sleeping)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    runs, slow = [scale.run("gating", context=32, seed=seed) for seed in range(2)], replace(scale, startup_seconds=700)
    for command_number in range(2):
        config = RunnerConfig(tmp_path, 1, 0.2, "cpu", str, lambda: runs)
        display = Silent()
        outcome = run_all(runs[::-1], slow, config, Store(tmp_path / "results", tmp_path), display)
        assert display.runs == [(runs[1].name, command_number == 1)]
        assert (outcome.stopped, outcome.not_started) == ([runs[1].name], [runs[0].name])


def test_nothing_is_started_that_the_next_command_could_finish(scale):
    runs = [scale.run("gating", context=32, seed=seed) for seed in range(2)]
    first, second = (run.name for run in runs)
    assert runner._next(runs, {first: 8, second: 9}, (), left=5, limit=10) is None
    assert runner._next(runs, {first: 8, second: 5}, (), left=5, limit=10) is runs[1]
    assert runner._next(runs, {first: 8, second: 9}, {second}, left=5, limit=10) is runs[1]
    # One that no command could finish, once nothing else fits.
    assert runner._next(runs, {first: 11, second: 5}, (), left=5, limit=10) is runs[1]
    assert runner._next(runs, {first: 11, second: 6}, (), left=5, limit=10) is runs[0]


def test_a_time_limit_below_a_runs_estimate_is_kept(folder, tmp_path):
    code, output = command(folder, tmp_path, "pair", "--minutes", 0.001)
    assert code == 0, output
    assert "gating_p2_c32_s0: started" in output
    assert "gating_p2_c32_s0: stopped; the same command resumes it" in output
    assert "2 of 2 runs are left" in output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gating_p2_c32_s0"]


def test_an_error_leaves_no_process_behind(scale, tmp_path, monkeypatch):
    """Neither a worker that does not stop when it is asked to, nor the processes that it started."""
    runs = [scale.run("gating", context=32, seed=seed) for seed in range(2)]
    reader, writer = os.pipe()
    processes = []

    def start(run, scale, config, index):
        if run is runs[1]:
            put(run, config.out)
            return subprocess.Popen(["true"], start_new_session=True)
        # The second in a session of its own, as torchrun starts the processes of a run.
        shell = "trap '' TERM; sleep 100 & setsid sleep 100 & wait; wait; wait"
        processes.append(subprocess.Popen(["sh", "-c", shell], start_new_session=True, pass_fds=[writer]))
        os.close(writer)
        return processes[0]

    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
    config = RunnerConfig(tmp_path, 2, None, "cpu", str, fail)
    with pytest.raises(OSError, match="No space left"):
        run_all(runs, scale, config, Store(tmp_path / "results", tmp_path), Silent())
    assert processes[0].returncode == -signal.SIGKILL
    # At its end once no process has the other end.
    assert select.select([reader], [], [], 10)[0]
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_second_ctrl_c_ends_the_workers_at_once(scale, tmp_path, monkeypatch):
    processes = []

    def start(*given):
        processes.append(sleeping(*given))
        return processes[-1]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    display = Silent()
    display.update = interrupted
    run = scale.run("gating", context=32)
    with pytest.raises(KeyboardInterrupt):
        run_all([run], scale, RunnerConfig(tmp_path, 1, None, "cpu", str, list), Store(tmp_path, tmp_path), display)
    assert processes[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [
        (None, 2, ["0", "1", "0"]),
        ("2,3", 2, ["2", "3", "2"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b", "GPU-a"]),
        # CUDA ignores what follows an entry that does not exist.
        ("4,5,-1,6", 2, ["4", "5", "4"]),
        ("3", 1, [None] * 3),
    ],
)
def test_each_run_gets_one_of_the_gpus_that_are_visible(monkeypatch, tmp_path, given, gpus, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = RunnerConfig(tmp_path, 3, None, "cuda", str, list)
    assert [runner._resources(config, index).get("CUDA_VISIBLE_DEVICES") for index in range(3)] == expected


def test_without_a_gpu_times_on_the_cpu_count(folder, tmp_path, monkeypatch):
    """Also where --device does not say so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = runs_of_pair(folder, {name: value for name, value in TINY.items() if name != "context"})[0]
    measured = {"power": 2, "context": 32, "tokens": run.tokens, "device": "cpu", "jobs": 1, "sittings": 1}
    put(run, tmp_path / "runs", total_seconds=777, **measured)
    code, output = command(folder, tmp_path, "pair", "--plan", device=None)
    assert code == 0, output
    assert "1 of 2 runs to do, 1,280 tokens, about 12:57" in output
    code, output = command(folder, tmp_path, "pair", "--plan", device="cuda")
    assert code == 0, output
    assert "about 12:57" not in output, "a plan for another machine"
    given = []
    monkeypatch.setattr(runner, "run_all", lambda runs, scale, config, *_: given.append(config) or runner.Outcome())
    assert command(folder, tmp_path, "pair", device=None)[0] == 0
    assert given[0].device == "cpu"


@pytest.mark.parametrize("gpus", [0, 4])
def test_a_scale_of_several_gpus_is_refused_where_there_are_fewer(folder, tmp_path, monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    code, output = command(folder, tmp_path, "pair", "--scale", "paper", "--set", "context=32", device=None)
    assert code == 2
    assert f"scale 'paper' needs a machine with 8 GPUs, which each of its runs takes; torch finds {gpus} here" in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 10**7}, r"an evaluation with length=10,000,000 needs a held-out document of 10,000,000 tokens"),
        ({"distances": (16, 10**7)}, r"distances up to 10,000,000 needs a held-out document of 10,000,0\d\d tokens"),
    ],
)
def test_an_evaluation_that_documents_are_too_short_for_is_refused_before_training(scale, tmp_path, changes, message):
    run = scale.run("gating", context=32, evaluation=replace(scale.evaluation, **changes))
    write_job(tmp_path, run, job(run))
    with pytest.raises(ValueError, match=rf"{message}; the longest of the standard library .* has [\d,]+$"):
        work(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "wanted.yaml"]


def test_pairs_that_the_text_has_too_few_tokens_for_are_refused_before_training(scale, tmp_path):
    run = scale.run("gating", context=32, evaluation=replace(scale.evaluation, pairs=(2, 1_000)))
    write_job(tmp_path, run, job(run))
    with pytest.raises(ValueError, match=r"pairs must be at most \d+, the number of keys; got 1000"):
        work(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "wanted.yaml"]


def test_the_table_says_how_many_seeds_are_in_a_mean(capsys):
    row = {"variant": "gating", "power": 2, "context": 32, "changes": {}, "tokens_per_second": 10}
    done = [{**row, "status": "done", "final_loss": loss, "heldout_loss": loss} for loss in (2.0, 3.0)]
    diverged = {**row, "status": "diverged", "final_loss": None}
    for rows, seeds in (([*done, diverged], "2 of 3"), (done, "2"), ([diverged], "0 of 1")):
        print_rows(rows)
        line = next(line for line in capsys.readouterr().out.splitlines() if "gating" in line)
        assert [cell.strip() for cell in line.split("│")][5] == seeds
        assert ("2.5000" in line) == (rows != [diverged])


def test_nothing_of_a_table_is_cut_off_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    changes = {f"a_field_with_a_long_name_{number}": 0.123456789 for number in range(4)}
    print_rows([{"variant": "gating", "power": 2, "context": 65_536, "changes": changes, "status": "done"}])
    lines = capsys.readouterr().out.splitlines()
    assert any(", ".join(f"{name} 0.123456789" for name in changes) in line and "65,536" in line for line in lines)


@pytest.mark.slow
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
        (
            ("pair", "--set", "power=4"),
            "set cannot change power in pair, which chooses it for its runs, such as gating_p2_c32_s0",
        ),
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
