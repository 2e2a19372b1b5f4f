"""Ctrl-C and SIGTERM as stop requests: the loop finishes its step, saves and ends. A second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a stop signal arrived, and which."""

    def __init__(self, wakeup: socket.socket | None = None) -> None:
        self.signal: str | None = None
        self._wakeup = wakeup
        self._arrived: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def arrived(self) -> str | None:
        """The signal, even while the main thread is blocked and `signal` is not set yet; for one other thread to call.

        Python runs signal handlers in the main thread between two bytecode instructions, of which a thread that is
        blocked in a collective executes none.
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
    """Handles SIGINT and SIGTERM until the block ends; only in the main thread, where Python allows it."""
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
        # Python's C handler writes every signal's number there at once, whatever the main thread is doing.
        wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield request
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)
