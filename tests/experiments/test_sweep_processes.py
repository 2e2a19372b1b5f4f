"""Sweeps several at a time: results, time limits, signals and errors are as for one after another."""

import os
import signal
import threading
from dataclasses import replace

import pytest
from experiment_settings import TINY_RECALL
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.experiments.sweep import SweepResults
from sympow.experiments.sweep_runner import run_sweeps
from sympow.train.signals import stop_on_signals

FIRST = replace(TINY_RECALL, name="first")
SWEEPS = [FIRST, replace(FIRST, name="second", rows=5, seeds=(1, 2))]
ENDLESS = replace(FIRST, name="endless", steps=10**7)


def test_results_are_those_of_one_after_another(tmp_path):
    found = {}
    for jobs in (1, 2):
        results, said = SweepResults.read(tmp_path / str(jobs), "mine"), []
        assert run_sweeps(SWEEPS, results, "cpu", str, None, said.append, tmp_path / "out", jobs=jobs) == []
        found[jobs] = SweepResults.read(tmp_path / str(jobs), "mine")
        assert sorted(line.partition(":")[0] for line in said) == ["first", "second"]
    assert found[1].curves == found[2].curves
    assert found[1].rows.keys() == found[2].rows.keys()
    for name, row in found[1].rows.items():
        same = {"overall", "validation", "best_rate", "settings", "steps", "command"}
        assert {key: row[key] for key in same} == {key: found[2].rows[name][key] for key in same}


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


@pytest.mark.slow
def test_an_error_is_raised_after_the_others_were_saved(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine_first.sweep").write_bytes(b"garbage")
    results = SweepResults.read(tmp_path, "mine")
    with pytest.raises(ValueError, match=r"mine_first.sweep is damaged: remove it"):
        run_sweeps([FIRST, ENDLESS], results, "cpu", str, None, lambda _: None, out, jobs=2)


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
