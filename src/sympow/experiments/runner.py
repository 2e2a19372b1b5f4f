"""Scheduler of an experiment: runs each run in its own process, several at a time, optionally within a time limit.

A finished run is skipped, and an interrupted one is resumed from its checkpoint. A run that would not finish within the
time that is left is not started, unless no limit of this length is enough for it and nothing else fits. Runs still in
training when the limit expires are asked to stop, which leaves a checkpoint.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
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
        device: "cpu" or "cuda".
        command: returns the command that repeats one run, given its name.
        on_finish: called after each run that has finished; returns all runs to train, which may be more than before.
    """

    out: Path
    jobs: int
    seconds: float | None
    device: str
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
    """What a command trains within its time limit.

    Attributes:
        runs: in the order they start.
        seconds: until the last of them ends or is stopped.
        commands: number of commands in a row that train the same runs for as long.
    """

    runs: list[Run]
    seconds: float
    commands: int = 1


def pack(
    runs: Sequence[Run],
    seconds: Mapping[str, float],
    jobs: int,
    limit: float | None,
    begun: Collection[str] = (),
) -> list[Allocation]:
    """Distributes runs over commands of at most `limit` seconds, `jobs` at a time, as `run_all` starts them.

    Interrupted runs come first, then runs in order as far as they fit. Where nothing else fits, a run starts that takes
    longer than the whole limit: it is stopped at the limit, and the next command resumes it.

    Args:
        seconds: estimates, by run.
        limit: None puts all runs into one allocation.
        begun: names of runs that were interrupted.
    """
    whole = math.inf if limit is None else limit
    needed = {run.name: seconds[run.name] for run in runs}
    resumed = set(begun)
    left, allocations = list(runs), []
    while left:
        waiting = sorted(left, key=lambda run: run.name not in resumed)
        busy_until = [0.0] * jobs
        taken: list[Run] = []
        while waiting:
            job = min(range(jobs), key=busy_until.__getitem__)
            rest = whole - busy_until[job]
            run = _next(waiting, needed, resumed, rest, limit)
            if run is None or rest <= 0:
                break
            waiting.remove(run)
            taken.append(run)
            spent = min(needed[run.name], rest)
            busy_until[job] += spent
            needed[run.name] -= spent
        resumed.update(run.name for run in taken)
        commands = 1
        if len(taken) <= jobs and all(needed[run.name] > 0 for run in taken):
            # All of them are trained for the whole limit, again and again until one of them ends.
            commands += int(min(needed[run.name] for run in taken) // whole)
            for run in taken:
                needed[run.name] -= (commands - 1) * whole
        allocations.append(Allocation(taken, max(busy_until), commands))
        left = [run for run in left if needed[run.name] > 0]
    return allocations


def _next(
    waiting: Sequence[Run], seconds: Mapping[str, float], begun: Collection[str], left: float, limit: float | None
) -> Run | None:
    """The run to start when there is room for one, or None.

    Args:
        seconds: estimates of whole runs, by name.
        begun: names of interrupted runs. One needs less than the estimate, and is stopped again if it must be.
        left: seconds until the limit.
        limit: seconds of the whole limit; None: there is none.
    """
    for run in waiting:
        if run.name in begun or seconds[run.name] <= left:
            return run
    # Runs that no command of this limit can finish would never be started otherwise.
    return next((run for run in waiting if limit is not None and seconds[run.name] > limit), None)


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
        try:
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
        except KeyboardInterrupt:
            # The second Ctrl-C ends everything at once.
            for job in jobs:
                _kill(job)
            raise
        finally:
            # Jobs are left only where something was raised. They have sessions of their own, and would train on.
            _end(jobs)
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
    if len(jobs) >= config.jobs:
        return
    left = math.inf if deadline is None else deadline - time.monotonic()
    seconds = {run.name: estimator.seconds(run, config.device == "cpu") for run in waiting}
    begun = {run.name for run in waiting if store.state(run) == "begun"}
    while len(jobs) < config.jobs and (run := _next(waiting, seconds, begun, left, config.seconds)) is not None:
        waiting.remove(run)
        index = min(set(range(config.jobs)) - {job.index for job in jobs})
        jobs.append(_Job(run, _start(run, scale, config, index), index))
        display.started(run, seconds[run.name], run.name in begun)


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
    if config.device != "cpu":
        import torch

        if (gpus := torch.cuda.device_count()) > 1:
            # Numbers or UUIDs; torch counts those before the first that does not exist.
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = [str(gpu) for gpu in range(gpus)] if given is None else given.split(",")[:gpus]
            variables["CUDA_VISIBLE_DEVICES"] = names[index % len(names)].strip()
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
            _kill(job)


def _kill(job: _Job) -> None:
    """Kills the process of a job and all that it started."""
    if job.process.poll() is not None:
        return
    # torchrun starts its processes in sessions of their own, so that they are not of this one's group.
    others = _descendants(job.process.pid)
    for kill, number in ((os.killpg, job.process.pid), *((os.kill, other) for other in others)):
        with suppress(ProcessLookupError):
            kill(number, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """Numbers of the processes that a process has started, and these in turn; none where there is no /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may have ended meanwhile.
        with suppress(OSError):
            # After the name, which may have any characters, come the state and the parent.
            parents[int(path.parent.name)] = int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    found = [process]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def _end(jobs: list[_Job]) -> None:
    """Asks jobs to stop, and returns when all have ended."""
    try:
        while running := [job for job in jobs if job.process.poll() is None]:
            _stop(running, time.monotonic())
            time.sleep(POLL_SECONDS)
    finally:
        # Ctrl-C while waiting.
        for job in jobs:
            _kill(job)
            job.process.wait()
