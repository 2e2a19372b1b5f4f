"""Processes that look after each other: when one dies or hangs, the others stop soon, and say which one it was.

A process that waits for another may wait for ever: NCCL's kernels do, and Gloo's errors do not say for whom. So each
process has a thread that counts up a number in the store where they met. The first process watches everyone's number,
and everyone the first's. A number that stands still is a process that is gone; whoever sees it writes that down, and
all who read it end.

A thread lives on where the main thread hangs. So the main thread marks how far it has come. All processes pass the same
marks, and those that wait for another have passed more of them than the one they wait for.
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

from sympow.train.distributed import Place
from sympow.train.rendezvous import connect, kept_by_torchrun
from sympow.train.signals import StopRequest

BEAT = 1.0
# Silent for so long, a process is taken for dead: all end within a minute.
PATIENCE = 30.0
# The same once someone could not reach another, or failed.
SUSPICION = 5.0
# How long a process may take to end by itself, once it is known that another is gone.
GRACE = 5.0
# How long the main thread may take to its next mark once it was asked to stop; longer if it took longer before.
# torchrun kills a process 30 s after it asked.
STOP_GRACE = 20.0
# How long everyone may take to say how far they are.
ANSWERS_WITHIN = 4 * BEAT
VERDICT = "verdict"
QUESTION = "question"
TROUBLE = "trouble"


class LostProcessError(RuntimeError):
    """Another process of the run is gone; the message names it."""


class Watch:
    """While the block runs, this process shows that it is alive and watches others.

    Args:
        place: of this process. Alone it has nobody to watch.
        stop: whether someone asked this process to stop.
        hang_after: seconds without a mark after which a process hangs; 0: never.
    """

    def __init__(self, place: Place, stop: StopRequest, hang_after: float) -> None:
        self._place, self._stop, self._hang_after = place, stop, hang_after
        self._name = f"rank {place.rank} (process {os.getpid()} on {socket.gethostname()})"
        self._all_here, self._leaving = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._watched_thread = threading.get_ident()
        self._marks, self._marked_at, self._longest, self._saves = 0, time.monotonic(), 0.0, False
        self._asked_at_mark: int | None = None
        self._asked_since = 0.0
        self._verdict: str | None = None

    def __enter__(self) -> Self:
        if self._place.world_size > 1:
            # Connections of their own: a thread must not hold up what training asks of the store, or wait for it.
            patience = timedelta(seconds=PATIENCE)
            self._store, self._main_store = (connect(self._place.attempt, "watch", patience) for _ in range(2))
            self._store.set(_name(self._place.rank), self._name)
            self._thread = threading.Thread(target=self._look_after, name="watch", daemon=True)
            self._thread.start()
            # Before anyone is watched, all must have a name.
            dist.barrier()
            self._all_here.set()
            self.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if error is None:
            self._main_store.set(_left(self._place.rank), "")
            # The first process may keep the store: it must not go before the others need it no more.
            while self._place.first and not all(self._main_store.check([_left(r)]) for r in self._others):
                time.sleep(BEAT / 50)
            self._leave()
            return
        # What this process finds wrong by itself is its own. Anything else may come from another that is gone.
        kinds = ValueError | TypeError | ArithmeticError | OSError | KeyboardInterrupt | SystemExit
        own = isinstance(error, kinds) and not isinstance(error, ConnectionError | TimeoutError)
        verdict = None if own else self._ask()
        self._leave()
        if verdict is not None:
            raise LostProcessError(verdict) from error
        _tell(self._main_store, VERDICT, f"{self._name} failed: {error!r}")

    def mark(self, *, saves: bool = False) -> None:
        """Called by the main thread wherever it has come further, in the same places in all processes.

        Args:
            saves: a disk is waited for until the next mark, which may take longer than anything before, and must not be
                cut short.
        """
        now = time.monotonic()
        if not self._saves:
            self._longest = max(self._longest, now - self._marked_at)
        self._marks, self._marked_at, self._saves = self._marks + 1, now, saves

    @property
    def _others(self) -> range:
        return range(1, self._place.world_size)

    def _leave(self) -> None:
        self._leaving.set()
        assert self._thread is not None
        self._thread.join()

    def _ask(self) -> str | None:
        """Which process is gone, if one is: waits as long as it takes to find out."""
        if self._verdict is not None:
            # The thread knows already; who keeps the store may be gone by now, too.
            return self._verdict
        _tell(self._main_store, TROUBLE, "yes")
        end = time.monotonic() + SUSPICION + 5 * BEAT
        while time.monotonic() < end:
            try:
                if self._main_store.check([VERDICT]):
                    return self._main_store.get(VERDICT).decode()
            except RuntimeError:
                return _without_store()
            time.sleep(BEAT / 4)
        return None

    def _look_after(self) -> None:
        """The thread: counts, watches, and ends the process if it must."""
        seen: dict[int, tuple[int, float]] = {}
        asked_at = None
        while self._verdict is None and not self._leaving.wait(BEAT):
            try:
                asked = self._stop.arrived()
                if asked is not None:
                    asked_at = asked_at or time.monotonic()
                    if self._ignores(asked_at):
                        said = (
                            f"{self._name} got {asked} and does not come out of {self._where()}: ended without saving"
                        )
                        _tell(self._store, VERDICT, said)
                self._store.add(_beat(self._place.rank), 1)
                if self._all_here.is_set():
                    self._find_dead(seen)
                    self._find_hanging()
                if self._store.check([VERDICT]):
                    self._verdict = self._store.get(VERDICT).decode()
            except RuntimeError:
                self._verdict = _without_store()
        # The main thread may have seen it, too, and be about to say more. The first process, which may keep the store,
        # goes last.
        grace = GRACE + 3 * BEAT if self._place.first else GRACE
        if self._verdict is not None and not self._leaving.wait(grace):
            print(f"stopped: {self._verdict}", file=sys.stderr, flush=True)
            # The main thread may be waiting for what will never come.
            os._exit(1)

    def _find_dead(self, seen: dict[int, tuple[int, float]]) -> None:
        """Tells everyone of a process whose number stands still."""
        patience = SUSPICION if self._store.check([TROUBLE]) else PATIENCE
        for other in self._others if self._place.first else range(1):
            now = self._store.add(_beat(other), 0)
            count, since = seen.get(other, (-1, 0.0))
            if now != count:
                seen[other] = now, time.monotonic()
            elif time.monotonic() - since > patience and not self._store.check([_left(other)]):
                silent = f"{_named(self._store, other)} is gone: not heard of for {patience:.0f} s"
                _tell(self._store, VERDICT, silent)

    def _find_hanging(self) -> None:
        """In the first process, asks everyone how far they are once it gets no further itself; in all, answers.

        Where one process hangs, all soon wait for it, the first one as well. Those that wait may have begun to before
        the one they wait for came to where it hangs: it is the number of marks that tells, not the time of the last.
        """
        if self._place.first:
            if not 0 < self._hang_after <= time.monotonic() - self._marked_at:
                if self._asked_at_mark is not None:
                    self._asked_at_mark = None
                    self._store.set(QUESTION, "")
                return
            if self._asked_at_mark != self._marks:
                self._asked_at_mark, self._asked_since = self._marks, time.monotonic()
                self._store.set(QUESTION, str(self._marks))
        # It has a number, so that an answer to an earlier one is not taken for one to this.
        question = self._store.get(QUESTION).decode() if self._store.check([QUESTION]) else ""
        if not question:
            return
        self._store.set(_answer(self._place.rank, question), f"{self._marks} {self._where()}")
        if not self._place.first or time.monotonic() - self._asked_since < ANSWERS_WITHIN:
            return
        answers = {}
        for rank in range(self._place.world_size):
            if self._store.check([_answer(rank, question)]) and not self._store.check([_left(rank)]):
                marks, _, where = self._store.get(_answer(rank, question)).decode().partition(" ")
                answers[rank] = int(marks), where
        fewest = min(marks for marks, _ in answers.values())
        found = [
            f"{_named(self._store, rank)} hangs in {where}"
            for rank, (marks, where) in answers.items()
            if marks == fewest
        ]
        _tell(self._store, VERDICT, f"{', '.join(found)}: no progress for {self._hang_after:.0f} s")

    def _ignores(self, asked_at: float) -> bool:
        """Whether the main thread does not come to where it would stop."""
        grace = self._hang_after if self._saves else max(STOP_GRACE, 2 * self._longest)
        return bool(grace) and time.monotonic() - max(asked_at, self._marked_at) > grace

    def _where(self) -> str:
        """What the main thread is at: the innermost line of sympow."""
        frame = sys._current_frames().get(self._watched_thread)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "sympow":
            frame = frame.f_back
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _tell(store: Store, key: str, value: str) -> None:
    """Writes, unless someone was first; if nobody keeps the store any more, there is nobody to tell."""
    try:
        store.compare_set(key, "", value)
    except RuntimeError:
        return


def _without_store() -> str:
    who = "torchrun" if kept_by_torchrun() else "rank 0"
    return f"{who}, which keeps what processes know of each other, is gone: it cannot be reached"


def _named(store: Store, rank: int) -> str:
    return store.get(_name(rank)).decode()


def _name(rank: int) -> str:
    return f"name/{rank}"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _answer(rank: int, question: str) -> str:
    return f"answer/{question}/{rank}"
