"""Ctrl-C and SIGTERM as a request: the loop finishes its step, saves and stops. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether someone asked to stop, and how."""

    def __init__(self, wakeup: socket.socket | None = None) -> None:
        self.signal: str | None = None
        self._wakeup = wakeup
        self._arrived: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def arrived(self) -> str | None:
        """The signal, also while the main thread is blocked and `signal` is not set; for one other thread to ask.

        Python calls its handlers in the main thread, between two of its instructions. A thread that waits for another
        process executes none.
        """
        while self._arrived is None and self._wakeup is not None:
            try:
                numbers = self._wakeup.recv(64)
            except BlockingIOError:
                break
            self._arrived = next((signal.Signals(number).name for number in numbers if number in SIGNALS), None)
        return self._arrived


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catches SIGINT and SIGTERM until the block ends. Only the main thread can; in another, nothing is caught."""
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    receiver, sender = socket.socketpair()
    request = StopRequest(receiver)

    def note(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number).name

    with receiver, sender:
        for end in (receiver, sender):
            end.setblocking(False)
        # The number of every signal is written there at once, whatever the main thread is doing.
        wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield request
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)
