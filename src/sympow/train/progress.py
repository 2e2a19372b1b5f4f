"""What a run shows while it runs: a bar with the numbers that matter on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from sympow.extras import require


class Progress:
    """Shows steps as they are made.

    Args:
        steps: of the whole run.
        quiet: show nothing; for all processes but the first.
    """

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps, self._first, self._quiet = steps, 0, quiet
        self._start = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            rich = require("rich.progress", "cli")
            console = require("rich.console", "cli").Console(stderr=True)
            self._bar = rich.Progress(
                rich.TextColumn("step"),
                rich.MofNCompleteColumn(),
                rich.BarColumn(),
                rich.TextColumn("{task.fields[numbers]}"),
                rich.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("training", total=steps, numbers="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int) -> None:
        """The first step comes now; so many were made before, and say nothing about the time that is left."""
        self._first, self._start = done, time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, completed=done)

    def step(self, step: int, numbers: str | None) -> None:
        """After a step; `numbers` if there are new ones."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **({} if numbers is None else {"numbers": numbers}))
        elif numbers is not None:
            left = (time.monotonic() - self._start) / max(1, step - self._first) * (self._steps - step)
            self.say(f"step {step:,} of {self._steps:,}  {numbers}  {_duration(left)} left")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
