"""Scheduler of an experiment: runs each run in its own process, several at a time, optionally within a time limit.

A finished run is skipped, and an interrupted one is resumed from its checkpoint. A run that would not finish within the
limit is not started, and runs still in training when it expires are asked to stop, which leaves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sympow.experiments.grid import Run, Scale
from sympow.experiments.store import Store
from sympow.experiments.worker import LOG_FILE, STOPPED, JobSpec, write_job
from sympow.train.monitoring import training_flops
from sympow.train.signals import stop_on_signals

if TYPE_CHECKING:
    from sympow.experiments.console import Display

# How long a run that is asked to stop may take to finish its step and save.
GRACE_SECONDS = 60.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunnerConfig:
    """How to run.

    Attributes:
        out: folder of the runs' own folders, with models and checkpoints.
        jobs: runs at a time; several GPUs are assigned round-robin.
        seconds: time limit; None: until all is done.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        command: returns the command that repeats one run, given its name.
        on_finish: called after each run that has finished; returns all runs to train, which may be more than before.
    """

    out: Path
    jobs: int
    seconds: float | None
    device: str | None
    command: Callable[[str], str]
    on_finish: Callable[[], Sequence[Run]]


@dataclass
class Outcome:
    """The outcome of each run, by name.

    Attributes:
        done: rows of finished runs, also of those that were finished earlier.
        failed: names, with the logs that say why.
        stopped: runs that were stopped by the time limit or an interruption; the next command resumes them.
        not_started: runs that did not fit into the time limit.
    """

    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, Path] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)
    interrupted: bool = False


class Estimator:
    """Estimates how long runs take: as long as similar runs took, otherwise by the scale's speed.

    Runs that share a GPU slow each other down; the estimate assumes proportionally, and measured times correct it.

    Args:
        scale: for its speed.
        jobs: runs at a time on one device.
        rows: rows of runs that have finished.
    """

    def __init__(self, scale: Scale, jobs: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._scale, self._jobs = scale, jobs
        self._measured: dict[tuple[Any, ...], float] = {}
        for row in rows:
            self.learn(row)

    def learn(self, row: Mapping[str, Any]) -> None:
        """Takes the time of an uninterrupted run with the same number of jobs; the slowest run of a kind counts."""
        if row.get("jobs") == self._jobs and row.get("sittings") == 1 and row.get("status") == "done":
            key = (row["power"], row["context"], row["tokens"], row["device"] == "cpu")
            self._measured[key] = max(self._measured.get(key, 0.0), row["total_seconds"])

    def seconds(self, run: Run, on_cpu: bool = False) -> float:
        """Time from the start of the process to the result."""
        known = self._measured.get((run.power, run.config.data.context, run.tokens, on_cpu))
        return known if known is not None else self._scale.startup_seconds + self._jobs * self._busy_seconds(run)

    def _busy_seconds(self, run: Run) -> float:
        model, evaluation = run.config.model, run.evaluation
        operations = run.tokens * training_flops(model, run.config.data.context)
        # A forward pass is a third of a step.
        operations += evaluation.tokens * training_flops(model, run.config.data.context) / 3
        if evaluation.length:
            tokens = evaluation.length * evaluation.documents
            operations += tokens * training_flops(model, evaluation.length) / 3
        return operations / self._scale.operations_per_second


@dataclass(frozen=True)
class Allocation:
    """Runs that fit into one time limit.

    Attributes:
        runs: in the order they start.
        seconds: until the last of them ends.
    """

    runs: list[Run]
    seconds: float


def pack(runs: Sequence[Run], seconds: Mapping[str, float], jobs: int, limit: float | None) -> list[Allocation]:
    """Distributes runs over allocations of at most `limit` seconds, `jobs` at a time, in order as far as they fit.

    A run that takes longer than the limit has an allocation to itself: it will be stopped, and resumed in the next.

    Args:
        seconds: estimates, by run.
        limit: None puts all runs into one allocation.
    """
    allocations = []
    waiting = list(runs)
    while waiting:
        busy_until = [0.0] * jobs
        taken: list[Run] = []
        left = []
        for run in waiting:
            job = min(range(jobs), key=busy_until.__getitem__)
            needed = seconds[run.name]
            if limit is not None and busy_until[job] + needed > limit and (taken or needed <= limit):
                left.append(run)
                continue
            busy_until[job] += needed
            taken.append(run)
        allocations.append(Allocation(taken, max(busy_until)))
        waiting = left
    return allocations


@dataclass
class _Job:
    """A run in training; `index` is the lowest number that no other job has."""

    run: Run
    process: subprocess.Popen[bytes]
    index: int
    asked_to_stop: float | None = None


def run_all(runs: Sequence[Run], scale: Scale, config: RunnerConfig, store: Store, display: Display) -> Outcome:
    """Trains and evaluates those of the runs that are not done, and those that an experiment adds to them."""
    outcome = Outcome()
    known = {run.name for run in runs}
    waiting = _take_done(runs, store, outcome)
    # Interrupted runs first, since they have made progress.
    waiting.sort(key=lambda run: store.state(run) != "begun")
    estimator = Estimator(scale, config.jobs, store.rows())
    deadline = None if config.seconds is None else time.monotonic() + config.seconds
    jobs: list[_Job] = []
    display.begin([run.name for run in runs], len(outcome.done))
    with stop_on_signals() as interruption:
        while waiting or jobs:
            now = time.monotonic()
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                if _record_exit(job, config, store, outcome, estimator, display):
                    added = [run for run in config.on_finish() if run.name not in known]
                    known |= {run.name for run in added}
                    new = _take_done(added, store, outcome)
                    waiting += new
                    display.added(len(added), len(added) - len(new))
            stop = bool(interruption) or (deadline is not None and now >= deadline)
            if stop:
                _stop(jobs, now)
            else:
                _start_what_fits(waiting, jobs, scale, config, store, estimator, deadline, display)
            if not jobs and (stop or waiting):
                break
            display.update({job.run.name: config.out / job.run.name for job in jobs})
            time.sleep(POLL_SECONDS)
        outcome.interrupted = bool(interruption)
    outcome.not_started = [run.name for run in waiting]
    return outcome


def _take_done(runs: Sequence[Run], store: Store, outcome: Outcome) -> list[Run]:
    """Enters the rows of those runs that are done, and returns the others."""
    for run in runs:
        if (row := store.row(run)) is not None:
            outcome.done[run.name] = row
    return [run for run in runs if run.name not in outcome.done]


def _start_what_fits(
    waiting: list[Run],
    jobs: list[_Job],
    scale: Scale,
    config: RunnerConfig,
    store: Store,
    estimator: Estimator,
    deadline: float | None,
    display: Display,
) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    for run in list(waiting):
        if len(jobs) >= config.jobs:
            return
        needed = estimator.seconds(run, config.device == "cpu")
        begun = store.state(run) == "begun"
        # An interrupted run needs less than the estimate, which is for a whole run; it is stopped again if it must be.
        if left is not None and needed > left and not begun:
            continue
        waiting.remove(run)
        index = min(set(range(config.jobs)) - {job.index for job in jobs})
        jobs.append(_Job(run, _start(run, scale, config, index), index))
        display.started(run, needed, begun)


def _start(run: Run, scale: Scale, config: RunnerConfig, index: int) -> subprocess.Popen[bytes]:
    folder = config.out / run.name
    job = JobSpec(
        run.name,
        run.variant,
        run.changes,
        run.evaluation,
        config.command(run.name),
        config.device,
        config.jobs,
        scale.keep_checkpoints,
    )
    write_job(folder, run, job)
    worker = ["-m", "sympow.experiments.worker", str(folder)]
    if scale.processes > 1 and config.device != "cpu":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(scale.processes)]
        command = [sys.executable, *launcher, *worker]
        environment = dict(os.environ)
    else:
        command = [sys.executable, *worker]
        environment = {**os.environ, **_resources(config, index)}
    with (folder / LOG_FILE).open("ab") as log:
        # In its own session, so that Ctrl-C reaches this process only.
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _resources(config: RunnerConfig, index: int) -> dict[str, str]:
    """Environment variables that give each concurrent run its share of the cores, and a GPU (round-robin)."""
    cores = str(max(1, (os.cpu_count() or 1) // config.jobs))
    variables = {name: os.environ.get(name, cores) for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    if config.device != "cpu" and "CUDA_VISIBLE_DEVICES" not in os.environ:
        import torch

        if (gpus := torch.cuda.device_count()) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = str(index % gpus)
    return variables


def _record_exit(
    job: _Job, config: RunnerConfig, store: Store, outcome: Outcome, estimator: Estimator, display: Display
) -> bool:
    """Records what became of a run, and returns whether it has finished."""
    name, code = job.run.name, job.process.returncode
    if code == 0 and (row := store.row(job.run)) is not None:
        outcome.done[name] = row
        estimator.learn(row)
        display.finished(name, row)
        return True
    if code == STOPPED or job.asked_to_stop is not None:
        outcome.stopped.append(name)
        display.say(f"{name}: stopped; the same command resumes it")
    else:
        outcome.failed[name] = config.out / name / LOG_FILE
        display.say(f"{name}: failed with exit code {code}; see {outcome.failed[name]}")
    return False


def _stop(jobs: list[_Job], now: float) -> None:
    """Asks each job once, and kills those that have not stopped after the grace period."""
    for job in jobs:
        if job.asked_to_stop is None:
            job.asked_to_stop = now
            job.process.send_signal(signal.SIGTERM)
        elif now > job.asked_to_stop + GRACE_SECONDS:
            job.process.kill()
