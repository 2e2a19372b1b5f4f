"""Runs the sweeps of an experiment one after another, or several at a time in processes of their own.

Sweeps of few small models are bound by the launches of their kernels and leave most of a GPU idle: several at a time
take less time in all.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from sympow.experiments.sweep import BaseSweep, StoppedError, SweepResults, run_sweep
from sympow.locks import locked
from sympow.train.signals import StopRequest, stop_on_signals

POLL_SECONDS = 0.2
# How long a process that is asked to stop may take to finish its step and save.
GRACE_SECONDS = 60.0


def run_sweeps(
    sweeps: Sequence[BaseSweep],
    results: SweepResults,
    device: str,
    command: Callable[[str], str],
    minutes: float | None,
    say: Callable[[str], None],
    out: Path | None = None,
    interruption: StopRequest | None = None,
    jobs: int = 1,
) -> list[str]:
    """Runs those sweeps that are not done, writes results after each, and returns the names of those left.

    A sweep that another command is training in the same folder `out` is left to it.

    Args:
        command: what repeats one sweep, by its name.
        minutes: time limit, at which sweeps that are being trained are saved.
        say: prints a line of progress.
        out: folder in which a sweep is saved, for the next call to continue it if this one stops; None: it is not.
        interruption: whether a signal asks the sweeps to stop; None: none does.
        jobs: sweeps at a time; each runs on the GPU that has the fewest of them.

    Raises:
        RuntimeError: the process of a sweep ended without a result. The others have been stopped and saved.
    """
    run = _Run(results, device, command, say, out, interruption, jobs)
    if minutes is not None:
        run.deadline = time.monotonic() + 60 * minutes
    new = []
    for sweep in sweeps:
        if results.done(sweep):
            say(f"{sweep.name}: done before")
        else:
            new.append(sweep)
    if jobs == 1:
        run.one_after_another(new)
    else:
        run.in_processes(new)
    return run.left


@dataclass
class _Worker:
    """A sweep that is being trained in a process, since a time of `time.monotonic`.

    Attributes:
        gpu: number of its GPU; 0 on the CPU.
        claim: holds the lock of the sweep.
    """

    sweep: BaseSweep
    process: SpawnProcess
    start: float
    gpu: int
    claim: ExitStack = field(default_factory=ExitStack)
    asked: bool = False

    def stop(self) -> None:
        """Asks the process, once, to save the sweep and end."""
        if not self.asked:
            self.asked = True
            self.process.terminate()


@dataclass
class _Run:
    """One call of `run_sweeps`, with its arguments.

    Attributes:
        deadline: of `time.monotonic`; None: none.
        left: names of sweeps that are not done.
        failure: the first error in a process. The others then save what they have.
    """

    results: SweepResults
    device: str
    command: Callable[[str], str]
    say: Callable[[str], None]
    out: Path | None
    interruption: StopRequest | None
    jobs: int
    deadline: float | None = None
    left: list[str] = field(default_factory=list)
    failure: Exception | None = None

    def one_after_another(self, sweeps: Sequence[BaseSweep]) -> None:
        for sweep in sweeps:
            if self._is_over():
                self.left.append(sweep.name)
                continue
            start = time.monotonic()
            with ExitStack() as claim:
                if not self._claim(sweep, claim):
                    continue
                try:
                    found = run_sweep(
                        sweep, self.device, self.command(sweep.name), self.deadline, self._checkpoint(sweep), self.say,
                        self.interruption,
                    )  # fmt: skip
                except StoppedError as error:
                    self._leave(sweep, error)
                else:
                    self._keep(sweep, found, start)

    def in_processes(self, sweeps: Sequence[BaseSweep]) -> None:
        waiting = list(sweeps)
        gpus = torch.cuda.device_count() if self.device == "cuda" else 1
        workers: dict[Connection, _Worker] = {}
        try:
            while waiting or workers:
                if self._is_over() or self.failure is not None:
                    self.left += [sweep.name for sweep in waiting]
                    waiting.clear()
                while waiting and len(workers) < self.jobs:
                    sweep = waiting.pop(0)
                    with ExitStack() as claim:
                        if self._claim(sweep, claim):
                            used = [worker.gpu for worker in workers.values()]
                            receiver, worker = self._start(sweep, min(range(gpus), key=used.count))
                            worker.claim, workers[receiver] = claim.pop_all(), worker
                if self.interruption or self.failure is not None:
                    for worker in workers.values():
                        worker.stop()
                for ready in wait(list(workers), POLL_SECONDS):
                    assert isinstance(ready, Connection)
                    if self._receive(ready, workers[ready]):
                        workers.pop(ready).claim.close()
        finally:
            # Only where something was raised, such as a full disk: the others are saved and not left without a reader.
            _end(workers)
        if self.failure is not None:
            raise self.failure

    def _start(self, sweep: BaseSweep, gpu: int) -> tuple[Connection, _Worker]:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        place = (self.device, gpu, self.jobs)
        work = (sweep, self.command(sweep.name), self.deadline, self._checkpoint(sweep))
        process = context.Process(target=_train_in_process, args=(sender, place, *work), name=sweep.name, daemon=True)
        # A terminal sends Ctrl-C to the process as well, which would end it with a traceback while it imports torch.
        # So it is started with the signal blocked, and unblocks it once it has a handler.
        # multiprocessing's tracker of resources has to run before: starting it unblocks the signal in this process.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # The process has the other copy: when it ends, receiving raises EOFError.
        sender.close()
        return receiver, _Worker(sweep, process, time.monotonic(), gpu)

    def _receive(self, receiver: Connection, worker: _Worker) -> bool:
        """Takes a message of a process; returns whether it was the last."""
        try:
            message = receiver.recv()
        except EOFError:
            worker.process.join()
            message = StoppedError("stopped before its first step")
            # Whoever interrupts this process may have interrupted that one as well, before it could save anything.
            if not (worker.asked or self.interruption):
                name, code = worker.sweep.name, worker.process.exitcode
                message = RuntimeError(f"the process of {name} ended without a result, with exit code {code}")
        if isinstance(message, str):
            self.say(message)
            return False
        receiver.close()
        worker.process.join()
        if isinstance(message, SweepResults):
            self._keep(worker.sweep, message, worker.start)
        elif isinstance(message, StoppedError):
            self._leave(worker.sweep, message)
        else:
            self.failure = self.failure or message
        return True

    def _is_over(self) -> bool:
        return bool(self.interruption) or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _checkpoint(self, sweep: BaseSweep) -> Path | None:
        return None if self.out is None else self.results.checkpoint(self.out, sweep)

    def _claim(self, sweep: BaseSweep, claim: ExitStack) -> bool:
        """Takes the lock of a sweep; returns whether it is to be trained here."""
        checkpoint = self._checkpoint(sweep)
        if checkpoint is None:
            return True
        try:
            claim.enter_context(locked(checkpoint, wait=False))
        except BlockingIOError:
            self.say(f"{sweep.name}: another command is training it")
            self.left.append(sweep.name)
            return False
        # Another command may have finished it since results were read.
        self.results.refresh()
        if self.results.done(sweep):
            claim.close()
            self.say(f"{sweep.name}: done by another command")
            return False
        return True

    def _keep(self, sweep: BaseSweep, found: SweepResults, start: float) -> None:
        self.results.add(found)
        # Only now: if the process dies, or the disk is full, the next command evaluates the saved models again.
        if (checkpoint := self._checkpoint(sweep)) is not None:
            checkpoint.unlink(missing_ok=True)
        self.say(f"{sweep.name}: {sweep.members} models in {time.monotonic() - start:.0f} s")

    def _leave(self, sweep: BaseSweep, error: StoppedError) -> None:
        self.say(f"{sweep.name}: {error}")
        self.left.append(sweep.name)


def _end(workers: dict[Connection, _Worker]) -> None:
    """Asks all processes to save their sweeps and end, kills those that have not ended after the grace period."""
    for receiver, worker in workers.items():
        worker.stop()
        # The process would wait for a reader of a long message.
        receiver.close()
    until = time.monotonic() + GRACE_SECONDS
    for worker in workers.values():
        worker.process.join(max(0.0, until - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.claim.close()


def _train_in_process(
    sender: Connection,
    place: tuple[str, int, int],
    sweep: BaseSweep,
    command: str,
    deadline: float | None,
    checkpoint: Path | None,
) -> None:
    """Trains a sweep in this process, and sends lines of progress, then its results or the error that ended it.

    Args:
        place: the device, the number of the GPU, and sweeps at a time, which share the cores.
    """
    device, gpu, jobs = place
    if device == "cuda":
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    result: SweepResults | StoppedError | ValueError
    with stop_on_signals() as interruption:
        # Blocked by the process that started this one.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            result = run_sweep(sweep, device, command, deadline, checkpoint, sender.send, interruption)
        except (StoppedError, ValueError) as error:
            result = error
        sender.send(result)
