"""A heartbeat between the processes of a run: when one dies or hangs, the others end and name it.

torch.distributed alone ends a run when a collective times out (after 30 minutes with Gloo, 10 with NCCL), and its error
names the processes that waited, not the one they waited for. Its timeout cannot be short, since a step or a save may
take longer than a lost machine should be waited for. So here each process has a thread, which runs on while the main
thread works, waits or hangs. Once a second it writes a report to the TCPStore: how far the main thread is, and where.
Rank 0 reads all reports, the others read that of rank 0.

A report that stays the same means a dead process. If no process makes progress, one of them hangs and the others wait
for it: it has made less progress, since all report progress at the same places in the code. Rank 0 writes its verdict
into its own report, and all processes that read it end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from sympow.errors import StoppedError
from sympow.train.processes import Place, connect_store, from_all_processes, torchrun_hosts_store
from sympow.train.signals import StopRequest

INTERVAL = 1.0
# A process without a new report for this many seconds counts as dead.
DEAD_AFTER = 30.0
# The same once a process has had an error that a dead process may have caused.
DEAD_AFTER_ERROR = 5.0
# Seconds that the main thread has to end by itself once a verdict is known.
EXIT_GRACE = 5.0
# Seconds that the main thread has to reach its next progress report after a stop signal; longer if a step takes longer.
# torchrun sends SIGKILL 30 s after SIGTERM.
STOP_GRACE = 20.0


class LostProcessError(StoppedError, RuntimeError):
    """Another process of the run is dead or hangs; the message names it."""


class Heartbeat:
    """While the block runs, this process reports how far it is, and reads the reports of others.

    Args:
        place: of this process. A run of one process has no heartbeat.
        stop: the stop signal, if one arrived.
        hang_after: seconds without progress after which a process counts as hanging; 0: never.
    """

    def __init__(self, place: Place, stop: StopRequest, hang_after: float) -> None:
        self._place, self._stop, self._hang_after = place, stop, hang_after
        self._main_thread = threading.get_ident()
        self._progress, self._progress_at, self._longest, self._saving = 0, time.monotonic(), 0.0, False
        self._stopped_at: float | None = None
        # What the report says besides. Trouble: what ends the run, as a predicate of this process.
        self._beats, self._done, self._suspects, self._trouble = 0, False, False, ""
        # Each process's last report, and the progress of all, with the time since which they have been the same.
        self._seen: dict[int | str, tuple[object, float]] = {}
        # Why the run ends; empty: all processes are done.
        self._verdict: str | None = None
        # Set by the main thread as it begins to leave the block and as it has left it, by the other one for a verdict.
        self._leaving, self._left, self._decided = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        if self._place.world_size > 1:
            self._store = connect_store(self._place.attempt, "heartbeat", timedelta(seconds=DEAD_AFTER))
            self._write_report()
            # Also waits until all reports are there.
            self._names = from_all_processes(
                f"rank {self._place.rank} (process {os.getpid()} on {socket.gethostname()})", self._place
            )
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()
            self.report_progress()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._place.world_size == 1:
            return
        # Errors of torch.distributed are RuntimeErrors. Any such may be caused by the death of another process.
        self._done, self._suspects = error is None, isinstance(error, RuntimeError)
        self._leaving.set()
        if error is None:
            self._decided.wait()
        elif not self._suspects or not self._decided.wait(DEAD_AFTER_ERROR + 5 * INTERVAL):
            self._trouble = f"failed: {error!r}"
            self._decided.wait(3 * INTERVAL)
        self._left.set()
        if self._verdict and not self._trouble:
            raise LostProcessError(self._verdict) from error

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

    def _run(self) -> None:
        """The thread: exchanges reports until there is a verdict, and then ends the process."""
        while self._verdict is None:
            if self._leaving.wait(INTERVAL):
                time.sleep(INTERVAL / 50)
            try:
                self._verdict = self._read_reports()
                self._write_report()
            except RuntimeError:
                host = "torchrun" if torchrun_hosts_store() else "rank 0"
                gone = f"{host}, which hosts the store of the process group, is gone: it cannot be reached"
                self._verdict = "" if self._done else gone
        if self._verdict and self._place.first:
            # It may host the store, in which the others read the verdict.
            time.sleep(2 * INTERVAL)
        self._decided.set()
        # The main thread may have failed for the same reason and be about to raise.
        if self._verdict and not self._left.wait(EXIT_GRACE):
            # In one write: other processes write their lines to the same log at the same time.
            sys.stderr.write(f"stopped: {self._verdict}\n")
            sys.stderr.flush()
            # The main thread may be blocked in a collective that will never complete.
            os._exit(1)

    def _write_report(self) -> None:
        self._beats += 1
        report = {
            "beats": self._beats,
            "progress": self._progress,
            "location": self._location(),
            "done": self._done,
            "suspects": self._suspects,
            "trouble": self._trouble or self._ignored_stop(),
            "verdict": self._verdict,
        }
        self._store.set(str(self._place.rank), json.dumps(report))

    def _read_reports(self) -> str | None:
        """The verdict, if there is one: that of rank 0, unless rank 0 is gone."""
        ranks = range(self._place.world_size if self._place.first else 1)
        reports = dict(zip(ranks, map(json.loads, self._store.multi_get([str(rank) for rank in ranks])), strict=True))
        suspicion = self._suspects or any(report["suspects"] for report in reports.values())
        dead_after = DEAD_AFTER_ERROR if suspicion else DEAD_AFTER
        for rank, report in reports.items():
            if self._seconds_unchanged(rank, report) > dead_after:
                return f"{self._names[rank]} is gone: no heartbeat for {dead_after:.0f} s"
        return self._judge(reports) if self._place.first else reports[0]["verdict"]

    def _judge(self, reports: Mapping[int, Mapping[str, Any]]) -> str | None:
        for rank, report in reports.items():
            if report["trouble"]:
                return f"{self._names[rank]} {report['trouble']}"
        at_work = {rank: report for rank, report in reports.items() if not report["done"]}
        if not at_work:
            return ""
        # A process may have begun to wait before the other reached the place where it hangs, so the count of progress
        # reports decides, not the time of the last.
        progress = {rank: report["progress"] for rank, report in at_work.items()}
        if 0 < self._hang_after <= self._seconds_unchanged("progress", progress):
            least = min(progress.values())
            hanging = [
                f"{self._names[rank]} hangs in {report['location']}"
                for rank, report in at_work.items()
                if report["progress"] == least
            ]
            return f"{', '.join(hanging)}: no progress for {self._hang_after:.0f} s"
        return None

    def _seconds_unchanged(self, key: int | str, value: object) -> float:
        before, since = self._seen.get(key, (None, 0.0))
        if value != before:
            since = time.monotonic()
            self._seen[key] = value, since
        return time.monotonic() - since

    def _ignored_stop(self) -> str:
        """The stop signal, if the main thread has not reached the place where it would stop; otherwise empty."""
        signal = self._stop.arrived()
        if signal is None:
            return ""
        self._stopped_at = self._stopped_at or time.monotonic()
        grace = self._hang_after if self._saving else max(STOP_GRACE, 2 * self._longest)
        if not 0 < grace < time.monotonic() - max(self._stopped_at, self._progress_at):
            return ""
        return f"received {signal} but stays blocked in {self._location()}; ended without a checkpoint"

    def _location(self) -> str:
        """The innermost line of sympow that the main thread is executing."""
        frame = sys._current_frames().get(self._main_thread)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "sympow":
            frame = frame.f_back
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
