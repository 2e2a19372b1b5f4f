"""A heartbeat between the processes of a run: when one dies or hangs, the others end and name it.

torch.distributed alone ends a run when a collective times out (after 30 minutes with Gloo, 10 with NCCL), and its error
names the processes that waited, not the one they waited for. Here each process has a thread that increments a counter
in the TCPStore once a second. Rank 0 monitors the counters of all ranks, and all ranks that of rank 0. A counter that
stands still means a dead process. Whoever notices writes a verdict to the store, and all processes that read it end.

The thread of a process keeps running while its main thread hangs. So the main thread also counts its own progress. All
processes report progress at the same places in the code; the one that hangs has reported less than those that wait for
it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from sympow.train.distributed import Place, connect_store, torchrun_hosts_store
from sympow.train.signals import StopRequest

INTERVAL = 1.0
# A process without a heartbeat for this many seconds counts as dead.
DEAD_AFTER = 30.0
# The same once a process has reported an error that a dead process may have caused.
DEAD_AFTER_ERROR = 5.0
# Seconds that the main thread has to end by itself once a verdict is known.
EXIT_GRACE = 5.0
# Seconds that the main thread has to reach its next progress report after a stop signal; longer if a step takes longer.
# torchrun sends SIGKILL 30 s after SIGTERM.
STOP_GRACE = 20.0
# Seconds within which all ranks report their progress when rank 0 asks.
REPORT_WITHIN = 4 * INTERVAL
VERDICT = "verdict"
PROGRESS_REQUEST = "progress_request"
ERROR_REPORTED = "error_reported"


class LostProcessError(RuntimeError):
    """Another process of the run is dead or hangs; the message names it."""


class Heartbeat:
    """While the block runs, this process sends its heartbeat and monitors those of others.

    Args:
        place: of this process. A run of one process has no heartbeat.
        stop: the stop signal, if one arrived.
        hang_after: seconds without progress after which a process counts as hanging; 0: never.
    """

    def __init__(self, place: Place, stop: StopRequest, hang_after: float) -> None:
        self._place, self._stop, self._hang_after = place, stop, hang_after
        self._name = f"rank {place.rank} (process {os.getpid()} on {socket.gethostname()})"
        self._all_started, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._main_thread = threading.get_ident()
        self._progress, self._progress_at, self._longest, self._saving = 0, time.monotonic(), 0.0, False
        self._requested_at_progress: int | None = None
        self._requested_at = 0.0
        self._verdict: str | None = None

    def __enter__(self) -> Self:
        if self._place.world_size > 1:
            # One connection for each thread: a request blocks its connection until the store answers.
            timeout = timedelta(seconds=DEAD_AFTER)
            self._store, self._main_store = (connect_store(self._place.attempt, "heartbeat", timeout) for _ in range(2))
            self._store.set(_name_key(self._place.rank), self._name)
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
            # Monitoring starts when all ranks have stored their names.
            dist.barrier()
            self._all_started.set()
            self.report_progress()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if error is None:
            self._main_store.set(_finished_key(self._place.rank), "")
            # Rank 0 may host the store, so it leaves last.
            while self._place.first and not all(self._main_store.check([_finished_key(r)]) for r in self._others):
                time.sleep(INTERVAL / 50)
            self._close()
            return
        # Errors of these types originate in this process. Any other may be caused by the death of another one.
        kinds = ValueError | TypeError | ArithmeticError | OSError | KeyboardInterrupt | SystemExit
        own = isinstance(error, kinds) and not isinstance(error, ConnectionError | TimeoutError)
        verdict = None if own else self._wait_for_verdict()
        self._close()
        if verdict is not None:
            raise LostProcessError(verdict) from error
        _set_first(self._main_store, VERDICT, f"{self._name} failed: {error!r}")

    def report_progress(self, *, saving: bool = False) -> None:
        """Called by the main thread at the same places in all processes.

        Args:
            saving: until the next report the process writes to disk, which may take longer than any step and is not to
                be interrupted by a stop signal.
        """
        now = time.monotonic()
        if not self._saving:
            self._longest = max(self._longest, now - self._progress_at)
        self._progress, self._progress_at, self._saving = self._progress + 1, now, saving

    @property
    def _others(self) -> range:
        return range(1, self._place.world_size)

    def _close(self) -> None:
        self._closed.set()
        assert self._thread is not None
        self._thread.join()

    def _wait_for_verdict(self) -> str | None:
        """Waits until a process is known to be dead; None if all turn out to be alive."""
        if self._verdict is not None:
            # The process that hosts the store may have ended by now.
            return self._verdict
        _set_first(self._main_store, ERROR_REPORTED, "yes")
        end = time.monotonic() + DEAD_AFTER_ERROR + 5 * INTERVAL
        while time.monotonic() < end:
            try:
                if self._main_store.check([VERDICT]):
                    return self._main_store.get(VERDICT).decode()
            except RuntimeError:
                return _store_is_lost()
            time.sleep(INTERVAL / 4)
        return None

    def _run(self) -> None:
        """The thread: sends heartbeats, monitors others, and ends the process after a verdict."""
        seen: dict[int, tuple[int, float]] = {}
        stopped_at = None
        while self._verdict is None and not self._closed.wait(INTERVAL):
            try:
                stop_signal = self._stop.arrived()
                if stop_signal is not None:
                    stopped_at = stopped_at or time.monotonic()
                    if self._ignores_stop(stopped_at):
                        blocked = f"received {stop_signal} but stays blocked in {self._location()}"
                        _set_first(self._store, VERDICT, f"{self._name} {blocked}; ended without a checkpoint")
                self._store.add(_beat_key(self._place.rank), 1)
                if self._all_started.is_set():
                    self._find_dead(seen)
                    self._find_hanging()
                if self._store.check([VERDICT]):
                    self._verdict = self._store.get(VERDICT).decode()
            except RuntimeError:
                self._verdict = _store_is_lost()
        # The main thread may have failed for the same reason and be about to raise. Rank 0, which may host the store,
        # ends last.
        grace = EXIT_GRACE + 3 * INTERVAL if self._place.first else EXIT_GRACE
        if self._verdict is not None and not self._closed.wait(grace):
            # In one write: other processes write their lines to the same log at the same time.
            sys.stderr.write(f"stopped: {self._verdict}\n")
            sys.stderr.flush()
            # The main thread may be blocked in a collective that will never complete.
            os._exit(1)

    def _find_dead(self, seen: dict[int, tuple[int, float]]) -> None:
        """Writes a verdict about a process whose counter stands still."""
        dead_after = DEAD_AFTER_ERROR if self._store.check([ERROR_REPORTED]) else DEAD_AFTER
        for other in self._others if self._place.first else range(1):
            now = self._store.add(_beat_key(other), 0)
            count, since = seen.get(other, (-1, 0.0))
            if now != count:
                seen[other] = now, time.monotonic()
            elif time.monotonic() - since > dead_after and not self._store.check([_finished_key(other)]):
                name = self._store.get(_name_key(other)).decode()
                _set_first(self._store, VERDICT, f"{name} is gone: no heartbeat for {dead_after:.0f} s")

    def _find_hanging(self) -> None:
        """Rank 0 requests a progress report once it makes no progress itself; every rank answers.

        When one process hangs, all others soon wait for it, rank 0 included. A process may have begun to wait before
        the other reached the place where it hangs, so the count of progress reports decides, not the time of the last.
        """
        if self._place.first:
            if not 0 < self._hang_after <= time.monotonic() - self._progress_at:
                if self._requested_at_progress is not None:
                    self._requested_at_progress = None
                    self._store.set(PROGRESS_REQUEST, "")
                return
            if self._requested_at_progress != self._progress:
                self._requested_at_progress, self._requested_at = self._progress, time.monotonic()
                self._store.set(PROGRESS_REQUEST, str(self._progress))
        # A request has a number, so that answers to an earlier one are not mistaken for answers to this one.
        request = self._store.get(PROGRESS_REQUEST).decode() if self._store.check([PROGRESS_REQUEST]) else ""
        if not request:
            return
        self._store.set(_report_key(self._place.rank, request), f"{self._progress} {self._location()}")
        if not self._place.first or time.monotonic() - self._requested_at < REPORT_WITHIN:
            return
        reports = {}
        for rank in range(self._place.world_size):
            if self._store.check([_report_key(rank, request)]) and not self._store.check([_finished_key(rank)]):
                progress, _, location = self._store.get(_report_key(rank, request)).decode().partition(" ")
                reports[rank] = int(progress), location
        least = min(progress for progress, _ in reports.values())
        hanging = [
            f"{self._store.get(_name_key(rank)).decode()} hangs in {location}"
            for rank, (progress, location) in reports.items()
            if progress == least
        ]
        _set_first(self._store, VERDICT, f"{', '.join(hanging)}: no progress for {self._hang_after:.0f} s")

    def _ignores_stop(self, stopped_at: float) -> bool:
        """Whether the main thread has not reached the place where it would stop."""
        grace = self._hang_after if self._saving else max(STOP_GRACE, 2 * self._longest)
        return bool(grace) and time.monotonic() - max(stopped_at, self._progress_at) > grace

    def _location(self) -> str:
        """The innermost line of sympow that the main thread is executing."""
        frame = sys._current_frames().get(self._main_thread)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "sympow":
            frame = frame.f_back
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _set_first(store: Store, key: str, value: str) -> None:
    """Sets a key that is not set yet; does nothing when the store is gone."""
    try:
        store.compare_set(key, "", value)
    except RuntimeError:
        return


def _store_is_lost() -> str:
    host = "torchrun" if torchrun_hosts_store() else "rank 0"
    return f"{host}, which hosts the store of the process group, is gone: it cannot be reached"


def _name_key(rank: int) -> str:
    return f"name/{rank}"


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _finished_key(rank: int) -> str:
    return f"finished/{rank}"


def _report_key(rank: int, request: str) -> str:
    return f"report/{request}/{rank}"
