"""`Launches`: bounds how many segments the host launches before the device has computed them.

Launching a CUDA graph takes the host far less time than running it takes the device. Without a bound, all segments of a
long context would be queued on the device's stream at once: a new request would wait for all of them, none could be
cancelled, and progress would be unknown. So the host is at most one round ahead: the device computes the segments of
one round while the host launches those of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


def mark_now(device: torch.device) -> torch.cuda.Event | None:
    """A mark after everything launched so far on the current stream of a device; None: it is computed already."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class Launches:
    """Launched segments in order, with callbacks for when they are computed.

    Args:
        mark: makes a mark, as `mark_now`.
    """

    def __init__(self, mark: Callable[[], torch.cuda.Event | None]) -> None:
        self._mark = mark
        self._under_way: deque[tuple[torch.cuda.Event | None, Callable[[], None]]] = deque()
        self._in_round = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def next_round(self) -> None:
        """Begins a round, after waiting for everything that was launched before the previous round."""
        self._wait(self._in_round)
        self._in_round = 0

    def add(self, when_done: Callable[[], None]) -> None:
        """Records that a segment was launched.

        Args:
            when_done: called once the segment is computed: by this method if it is already, or by a later method.
        """
        self._under_way.append((self._mark(), when_done))
        self._in_round += 1
        self._wait(len(self._under_way))

    def wait(self) -> None:
        """Waits until everything that was launched is computed."""
        self._wait(0)

    def clear(self) -> None:
        """Forgets all launched segments."""
        self._under_way.clear()

    def _wait(self, most: int) -> None:
        """Waits until at most `most` segments are not computed, and calls the callbacks of the others."""
        while self._under_way:
            mark, when_done = self._under_way[0]
            if mark is not None and not mark.query():
                if len(self._under_way) <= most:
                    return
                mark.synchronize()
            self._under_way.popleft()
            when_done()
