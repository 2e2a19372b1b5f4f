"""Runs an experiment: each run in a process of its own, several at a time, within a time if one is given.

A run that is done is skipped, one that was interrupted goes on from its checkpoint. Nothing is started that would not
end in time, and what still runs at the end of it is asked to stop, which leaves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sympow.experiment.display import Display
from sympow.experiment.plan import Estimator
from sympow.experiment.results import all_rows, read_row, result_of
from sympow.experiment.runs import Run
from sympow.experiment.scales import Scale
from sympow.experiment.worker import LOG_FILE, STOPPED, Order, give_order
from sympow.report.run_collection import RESULT_FILE, RUNS
from sympow.train.run_folder import CONFIG_FILE
from sympow.train.signals import stop_on_signals

# How long a run may take to finish its step and save, when it is asked to stop.
GRACE_SECONDS = 60.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Setting:
    """How to run.

    Attributes:
        out: folder for the runs' own folders, with models and checkpoints.
        results: folder for what remains of them (`sympow.experiment.results`).
        jobs: runs at a time; with several GPUs they take turns.
        seconds: to stop after; None: when all is done.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        command: that makes one run again, from its name.
    """

    out: Path
    results: Path
    jobs: int
    seconds: float | None
    device: str | None
    command: Callable[[str], str]


@dataclass
class Outcome:
    """What became of the runs, by name.

    Attributes:
        done: results, also of runs that were done before.
        failed: names, with the logs that say why.
        stopped: that time ran out for, or that were interrupted; they go on next time.
        not_started: that time did not suffice for.
    """

    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, Path] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)
    interrupted: bool = False


@dataclass
class _Job:
    run: Run
    process: subprocess.Popen[bytes]
    slot: int
    asked_to_stop: float | None = None


def state_of(run: Run, out: Path, results: Path) -> str:
    """What there is of a run: it is "done", "begun" or "new"."""
    if result_of(run, results) is not None:
        return "done"
    return "begun" if (out / run.name / CONFIG_FILE).is_file() else "new"


def run_all(runs: Sequence[Run], scale: Scale, setting: Setting, display: Display) -> Outcome:
    """Does what is left to do of some runs."""
    outcome = Outcome()
    for run in runs:
        if (row := result_of(run, setting.results)) is not None:
            outcome.done[run.name] = row
    waiting = [run for run in runs if run.name not in outcome.done]
    # Begun ones first: their checkpoints are worth something.
    waiting.sort(key=lambda run: state_of(run, setting.out, setting.results) != "begun")
    estimator = Estimator(scale, setting.jobs, all_rows(setting.results))
    deadline = None if setting.seconds is None else time.monotonic() + setting.seconds
    jobs: list[_Job] = []
    display.begin([run.name for run in runs], len(outcome.done))
    with stop_on_signals() as interruption:
        while waiting or jobs:
            now = time.monotonic()
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                _settle(job, setting, outcome, estimator, display)
            stop = bool(interruption) or (deadline is not None and now >= deadline)
            if stop:
                _stop(jobs, now)
            else:
                _start_what_fits(waiting, jobs, scale, setting, estimator, deadline, display)
            if not jobs and (stop or waiting):
                break
            display.update({job.run.name: setting.out / job.run.name for job in jobs})
            time.sleep(POLL_SECONDS)
        outcome.interrupted = bool(interruption)
    outcome.not_started = [run.name for run in waiting]
    return outcome


def _start_what_fits(
    waiting: list[Run],
    jobs: list[_Job],
    scale: Scale,
    setting: Setting,
    estimator: Estimator,
    deadline: float | None,
    display: Display,
) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    for run in list(waiting):
        if len(jobs) >= setting.jobs:
            return
        needed = estimator.seconds(run, setting.device == "cpu")
        begun = state_of(run, setting.out, setting.results) == "begun"
        # One that was begun has less to do than is known; it will be stopped if it must.
        if left is not None and needed > left and not begun:
            continue
        waiting.remove(run)
        slot = min(set(range(setting.jobs)) - {job.slot for job in jobs})
        jobs.append(_Job(run, _start(run, scale, setting, slot), slot))
        display.started(run, needed, begun)


def _start(run: Run, scale: Scale, setting: Setting, slot: int) -> subprocess.Popen[bytes]:
    folder = setting.out / run.name
    order = Order(
        run.name,
        run.variant,
        run.changes,
        run.evaluation,
        str(setting.results),
        setting.command(run.name),
        setting.device,
        setting.jobs,
        scale.keep_checkpoints,
    )
    give_order(folder, run, order)
    worker = ["-m", "sympow.experiment.worker", str(folder)]
    if scale.processes > 1 and setting.device != "cpu":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(scale.processes)]
        command = [sys.executable, *launcher, *worker]
        environment = dict(os.environ)
    else:
        command = [sys.executable, *worker]
        environment = {**os.environ, **_share_of_the_machine(setting, slot)}
    with (folder / LOG_FILE).open("ab") as log:
        # A session of its own: Ctrl-C is for this process to answer.
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _share_of_the_machine(setting: Setting, slot: int) -> dict[str, str]:
    """Cores for each of the runs beside each other, and a GPU in turn."""
    cores = str(max(1, (os.cpu_count() or 1) // setting.jobs))
    share = {name: os.environ.get(name, cores) for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    if setting.device != "cpu" and "CUDA_VISIBLE_DEVICES" not in os.environ:
        import torch

        if (gpus := torch.cuda.device_count()) > 1:
            share["CUDA_VISIBLE_DEVICES"] = str(slot % gpus)
    return share


def _settle(job: _Job, setting: Setting, outcome: Outcome, estimator: Estimator, display: Display) -> None:
    name, code = job.run.name, job.process.returncode
    path = setting.results / RUNS / name / RESULT_FILE
    if code == 0 and path.is_file():
        outcome.done[name] = read_row(path)
        estimator.learn(outcome.done[name])
        display.finished(name, outcome.done[name])
    elif code == STOPPED or job.asked_to_stop is not None:
        outcome.stopped.append(name)
        display.say(f"{name}: stopped; the same command goes on with it")
    else:
        outcome.failed[name] = setting.out / name / LOG_FILE
        display.say(f"{name}: failed with exit code {code}; see {outcome.failed[name]}")


def _stop(jobs: list[_Job], now: float) -> None:
    """Asks each once, and ends those that do not answer in time."""
    for job in jobs:
        if job.asked_to_stop is None:
            job.asked_to_stop = now
            job.process.send_signal(signal.SIGTERM)
        elif now > job.asked_to_stop + GRACE_SECONDS:
            job.process.kill()
