"""`Launches`: segments that the host has launched and the device has not computed yet, of which there are few.

A graph takes the host far less time to launch than the device to compute. Without a limit, all of a long context would
be on the device's stream at once: a request that arrives would wait for all of it, nothing could be cancelled, and
nobody would know how much is done. So the host is at most one round ahead: the device computes the segments of one
round while the host launches those of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the device's work, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Waits until it has."""


class _Passed:
    """A mark on a device that computes before a launch returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def mark_now(device: torch.device) -> Mark:
    """A mark after all that was launched on the current stream of a device."""
    if device.type != "cuda":
        return _Passed()
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(device))
    return mark


class Launches:
    """What was launched, in order, and what to do when it is computed.

    Args:
        mark: makes a mark after what was launched so far.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._under_way: deque[tuple[Mark, Callable[[], None]]] = deque()
        self._in_round = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def next_round(self) -> None:
        """Begins a round, once all is computed that was launched before the last one."""
        self._wait(self._in_round)
        self._in_round = 0

    def add(self, when_done: Callable[[], None]) -> None:
        """Notes that something was launched.

        Args:
            when_done: called by a later method of this class once it is computed, or by this one if it is already.
        """
        self._under_way.append((self._mark(), when_done))
        self._in_round += 1
        self._wait(len(self._under_way))

    def wait(self) -> None:
        """Waits until all is computed."""
        self._wait(0)

    def clear(self) -> None:
        """Forgets all that is under way."""
        self._under_way.clear()

    def _wait(self, most: int) -> None:
        """Waits until no more than `most` are under way, and takes off those that are computed."""
        while self._under_way and (len(self._under_way) > most or self._under_way[0][0].query()):
            mark, when_done = self._under_way.popleft()
            mark.synchronize()
            when_done()
