"""Processes that look after each other: when one dies, the others stop soon, and say which one it was.

A process that waits for a dead one may wait for ever: NCCL's kernels do, and Gloo's errors do not say for whom. So each
process has a thread that counts up a number in the store where they met. The first process watches everyone's number,
and everyone the first's. A number that stands still is a process that is gone; whoever sees it writes that down, and
all who read it end.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from sympow.train.distributed import Place
from sympow.train.meeting import connect, kept_by_torchrun

BEAT = 1.0
# Silent for so long, a process is taken for dead: all end within a minute.
PATIENCE = 30.0
# The same once someone could not reach another, or failed.
SUSPICION = 5.0
# How long a process may take to end by itself, once it is known that another is gone.
GRACE = 5.0
VERDICT = "verdict"
TROUBLE = "trouble"


class LostProcessError(RuntimeError):
    """Another process of the run is gone; the message names it."""


class Watch:
    """While the block runs, this process shows that it is alive and watches others.

    Args:
        place: of this process. Alone it has nobody to watch.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._name = f"rank {place.rank} (process {os.getpid()} on {socket.gethostname()})"
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._place.world_size > 1:
            # Connections of their own: a thread must not hold up what training asks of the store, or wait for it.
            patience = timedelta(seconds=PATIENCE)
            self._store, self._main_store = (connect(self._place.attempt, "watch", patience) for _ in range(2))
            self._store.set(_name(self._place.rank), self._name)
            # Before anyone is watched, all must have a name.
            dist.barrier()
            self._thread = threading.Thread(target=self._look_after, name="watch", daemon=True)
            self._thread.start()
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
        own = isinstance(error, ValueError | TypeError | ArithmeticError | KeyboardInterrupt | SystemExit)
        verdict = None if own else self._ask()
        self._leave()
        if verdict is not None:
            raise LostProcessError(verdict) from error
        _tell(self._main_store, VERDICT, f"{self._name} failed: {error!r}")

    @property
    def _others(self) -> range:
        return range(1, self._place.world_size)

    def _leave(self) -> None:
        self._leaving.set()
        assert self._thread is not None
        self._thread.join()

    def _ask(self) -> str | None:
        """Which process is gone, if one is: waits as long as it takes to find out."""
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
        rank = self._place.rank
        watched = self._others if rank == 0 else range(1)
        seen = {other: (0, time.monotonic()) for other in watched}
        verdict = None
        while verdict is None and not self._leaving.wait(BEAT):
            try:
                self._store.add(_beat(rank), 1)
                patience = SUSPICION if self._store.check([TROUBLE]) else PATIENCE
                for other, (count, since) in seen.items():
                    now = self._store.add(_beat(other), 0)
                    if now != count:
                        seen[other] = now, time.monotonic()
                    elif time.monotonic() - since > patience and not self._store.check([_left(other)]):
                        silent = f"{_named(self._store, other)} is gone: not heard of for {patience:.0f} s"
                        _tell(self._store, VERDICT, silent)
                if self._store.check([VERDICT]):
                    verdict = self._store.get(VERDICT).decode()
            except RuntimeError:
                verdict = _without_store()
        # The main thread may have seen it, too, and be about to say more.
        if verdict is not None and not self._leaving.wait(GRACE):
            print(f"stopped: {verdict}", file=sys.stderr, flush=True)
            # The main thread may be waiting for what will never come.
            os._exit(1)


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
