"""Sweeps several at a time: results, time limits, signals and errors are as for one after another."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiment_settings import TINY_RECALL
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.experiments import sweep_runner
from sympow.experiments.sweep import SweepResults
from sympow.experiments.sweep_runner import run_sweeps
from sympow.train.signals import StopRequest, stop_on_signals

FIRST = replace(TINY_RECALL, name="first")
SWEEPS = [FIRST, replace(FIRST, name="second", rows=5, seeds=(1, 2))]
# No accuracy reaches its target.
ENDLESS = replace(FIRST, name="endless", steps=10**7, target=2.0)


def in_training():
    """Processes of sweeps; other tests of this session may have children as well."""
    names = {"endless", "other", "late", "first", "second"}
    return [process for process in multiprocessing.active_children() if process.name in names]


@pytest.mark.slow
def test_results_are_those_of_one_after_another(tmp_path):
    found = {}
    for jobs in (1, 2):
        results, said = SweepResults.read(tmp_path / str(jobs), "mine"), []
        assert run_sweeps(SWEEPS, results, "cpu", str, None, said.append, tmp_path / "out", jobs=jobs) == []
        found[jobs] = SweepResults.read(tmp_path / str(jobs), "mine")
        assert sorted(line.partition(":")[0] for line in said) == ["first", "second"]
    assert list((tmp_path / "out").iterdir()) == []
    assert found[1].curves == found[2].curves
    assert found[1].rows.keys() == found[2].rows.keys()
    for name, row in found[1].rows.items():
        same = {"overall", "validation", "best_rate", "settings", "steps", "command"}
        assert {key: row[key] for key in same} == {key: found[2].rows[name][key] for key in same}


@pytest.mark.slow
def test_a_time_limit_saves_those_in_training_and_starts_no_others(tmp_path):
    results, said = SweepResults.read(tmp_path, "mine"), []
    sweeps = [ENDLESS, replace(ENDLESS, name="other"), replace(ENDLESS, name="late")]
    left = run_sweeps(sweeps, results, "cpu", str, 0.01, said.append, tmp_path / "out", jobs=2)
    assert sorted(left) == ["endless", "late", "other"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine_endless.sweep", "mine_other.sweep"]
    assert not results.table.exists()


@pytest.mark.slow
def test_a_signal_stops_all_processes(tmp_path):
    results, said = SweepResults.read(tmp_path, "mine"), []
    trained = threading.Event()

    def say(line):
        said.append(line)
        # The two short ones are done while the endless one is in training.
        if sum("models in" in one for one in said) == 2:
            trained.set()

    def interrupt():
        if trained.wait(120):
            os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with stop_on_signals() as interruption:
        sweeps = [ENDLESS, *SWEEPS, replace(ENDLESS, name="late")]
        left = run_sweeps(sweeps, results, "cpu", str, None, say, tmp_path / "out", interruption, jobs=2)
    killer.join()
    assert sorted(left) == ["endless", "late"]
    assert sorted(results.rows) == ["recall_first", "recall_second"]
    assert (tmp_path / "out" / "mine_endless.sweep").is_file()


class Ended:
    """A process that has ended without a result."""

    exitcode = -2

    def join(self, timeout=None):
        pass

    kill = terminate = join


def test_each_sweep_gets_the_gpu_with_the_fewest(tmp_path, monkeypatch):
    """With two GPUs and three at a time, those on the second end first: the next gets the second."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given, senders = [], {}

    def start(self, sweep, gpu):
        receiver, senders[sweep.name] = multiprocessing.Pipe(duplex=False)
        given.append((sweep.name, gpu))
        if len(given) == 3:
            finish("b")
        if len(given) == 4:
            for name in "acd":
                finish(name)
        return receiver, sweep_runner._Worker(sweep, Ended(), 0.0, gpu)

    def finish(name):
        row = {name: {"run": name, "settings": {}}}
        senders[name].send(SweepResults(Path(), name, row, row))

    monkeypatch.setattr(sweep_runner._Run, "_start", start)
    sweeps, results = [replace(FIRST, name=name) for name in "abcd"], SweepResults.read(tmp_path, "mine")
    assert run_sweeps(sweeps, results, "cuda", str, None, lambda _: None, tmp_path / "out", jobs=3) == []
    assert given == [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
    assert list(results.rows) == ["b", "a", "c", "d"]


def test_a_process_that_an_interruption_ends_is_no_error(tmp_path, monkeypatch):
    asked = StopRequest()

    def start(self, sweep, gpu):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        # Ctrl-C reaches both processes: the other has ended before it was asked to.
        sender.close()
        asked.signal = "SIGINT"
        worker = sweep_runner._Worker(sweep, Ended(), 0.0, gpu)
        monkeypatch.setattr(sweep_runner._Worker, "stop", lambda _: None)
        return receiver, worker

    monkeypatch.setattr(sweep_runner._Run, "_start", start)
    said, results = [], SweepResults.read(tmp_path, "mine")
    assert run_sweeps([FIRST], results, "cpu", str, None, said.append, tmp_path / "out", asked, jobs=2) == ["first"]
    assert said == ["first: stopped before its first step"]


@pytest.mark.slow
def test_ctrl_c_while_processes_start_leaves_the_sweeps(tmp_path, capfd):
    """A terminal sends it to all processes, those included that import torch at this time."""

    def interrupt():
        until = time.monotonic() + 60
        while len(started := in_training()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        for process in started:
            os.kill(process.pid, signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    said, sweeps = [], [ENDLESS, replace(ENDLESS, name="other")]
    results = SweepResults.read(tmp_path, "mine")
    left = run_sweeps(sweeps, results, "cpu", str, None, said.append, tmp_path / "out", jobs=2)
    killer.join()
    assert sorted(left) == ["endless", "other"]
    assert sorted(said) == [f"{name}: stopped at step 0 of 10,000,000" for name in ("endless", "other")]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_full_disk_stops_the_others_and_loses_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SweepResults, "write", refuse)
    results, out = SweepResults.read(tmp_path, "mine"), tmp_path / "out"
    with pytest.raises(OSError, match="No space left"):
        run_sweeps([FIRST, ENDLESS], results, "cpu", str, None, lambda _: None, out, jobs=2)
    assert in_training() == []
    assert (out / "mine_first.sweep").is_file()


@pytest.mark.slow
def test_an_error_is_raised_after_the_others_were_saved(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine_second.sweep").write_bytes(b"garbage")
    results = SweepResults.read(tmp_path, "mine")
    # The damaged one is read when the first is done, at which time the endless one is in training.
    with pytest.raises(ValueError, match=r"mine_second.sweep is damaged: remove it"):
        run_sweeps([ENDLESS, *SWEEPS], results, "cpu", str, None, lambda _: None, out, jobs=2)
    assert in_training() == []
    assert list(SweepResults.read(tmp_path, "mine").rows) == ["recall_first"]
    assert sorted(path.name for path in out.iterdir()) == ["mine_endless.sweep", "mine_second.sweep"]


@pytest.mark.slow
def test_a_process_that_dies_is_named(tmp_path):
    results = SweepResults.read(tmp_path, "mine")
    # A folder in the place of the checkpoint.
    (tmp_path / "out" / "mine_first.sweep").mkdir(parents=True)
    (tmp_path / "out" / "mine_first.sweep" / "file").write_text("")
    with pytest.raises(RuntimeError, match="the process of first ended without a result, with exit code 1"):
        run_sweeps([FIRST], results, "cpu", str, None, lambda _: None, tmp_path / "out", jobs=2)


@pytest.mark.slow
def test_the_command_takes_jobs(tmp_path):
    given = ["experiment", "recall", "--scale", "cpu", "--jobs", "2", "--device", "cpu"]
    given += ["--set", "steps=2", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    outcome = CliRunner().invoke(app, given)
    assert outcome.exit_code == 0, outcome.output
    assert len(SweepResults.read(tmp_path / "results", "recall").rows) == 2
