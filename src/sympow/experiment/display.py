"""What `sympow experiment` shows: a bar for every run that is trained and one for all, or plain lines in a log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sympow.experiment.runs import Run
from sympow.extras import require
from sympow.train.run_folder import METRICS_FILE


class Display:
    """Shows runs as they go on; as a context, for as long as they do."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._steps: dict[str, int] = {}
        self._tasks: dict[str, Any] = {}
        self._done = self._total = 0
        self._bars: Any = None
        if sys.stderr.isatty():
            rich = require("rich.progress", "cli")
            self._bars = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TextColumn("{task.fields[numbers]}"),
                rich.TimeElapsedColumn(),
                console=require("rich.console", "cli").Console(stderr=True),
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, names: Sequence[str], done: int) -> None:
        """Before the first run; so many are done already."""
        self._total, self._done = len(names), done
        if self._bars is not None:
            self._all = self._bars.add_task("all runs", total=self._total, completed=done, numbers="")
        self.say(f"{self._total} runs, {done} of them done")

    def started(self, run: Run, seconds: float, again: bool) -> None:
        self._steps[run.name] = run.config.run.steps
        if self._bars is not None:
            self._tasks[run.name] = self._bars.add_task(run.name, total=run.config.run.steps, numbers="starting")
        self.say(f"{run.name}: {'going on' if again else 'started'}, about {seconds:.0f} s")

    def update(self, running: Mapping[str, Path]) -> None:
        """While runs go on, from what they write into their folders."""
        if self._bars is None:
            return
        for name in [name for name in self._tasks if name not in running]:
            self._bars.remove_task(self._tasks.pop(name))
        for name, folder in running.items():
            if (line := _last_line(folder / METRICS_FILE)) is not None:
                numbers = f"loss {line['loss']:.4f}" + ("  evaluating" if line["step"] >= self._steps[name] else "")
                self._bars.update(self._tasks[name], completed=line["step"], numbers=numbers)

    def finished(self, name: str, row: Mapping[str, Any]) -> None:
        self._done += 1
        if self._bars is not None:
            self._bars.update(self._all, completed=self._done)
        what = (
            f"loss {row['final_loss']:.4f}, held out {row['heldout_loss']:.4f}"
            if row["status"] == "done"
            else row["status"]
        )
        self.say(f"{name}: {what}, {row['total_seconds']:.0f} s ({self._done} of {self._total})")

    def say(self, line: str) -> None:
        """A line that stays, with the time since the beginning."""
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        line = f"{minutes:3d}:{seconds:02d}  {line}"
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file, without reading all of it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8_192))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    # After the last end of a line nothing stands, or a line that is being written.
    for line in reversed(lines[:-1]):
        if line:
            try:
                content: dict[str, Any] = json.loads(line)
            except ValueError:
                return None
            return content
    return None
