"""Metrics of a run: written to metrics.jsonl, TensorBoard and Weights & Biases, shown as progress, and read back."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Protocol, Self

from sympow.errors import UserError
from sympow.extras import require
from sympow.files import naming, write_atomically

WANDB_FILE = "wandb-id"


class Writer(Protocol):
    """A destination of metrics."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def flush(self) -> None:
        """Makes what was written survive a kill; called before each checkpoint."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """One line per step, unbuffered, so that a killed run keeps them; a resumed run continues after its checkpoint."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        # Steps after the checkpoint are repeated.
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_at] if path.exists() else []
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        # Unbuffered: a buffer that could not be written would be written again on closing.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        line = memoryview((json.dumps({"step": step, **numbers}) + "\n").encode())
        with naming(self._file.name):
            while line:
                line = line[self._file.write(line) :]

    def flush(self) -> None:
        with naming(self._file.name):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path, resumed_at: int) -> None:
        require("tensorboard", "train")
        from torch.utils.tensorboard import SummaryWriter

        self._folder = str(folder)
        self._hook_before = threading.excepthook
        threading.excepthook = self._ignore_failed_writes
        # purge_step hides what a killed run wrote after its checkpoint.
        self._writer = SummaryWriter(self._folder, purge_step=resumed_at + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        with naming(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        with naming(self._folder):
            self._writer.flush()

    def close(self) -> None:
        try:
            with naming(self._folder):
                self._writer.close()
        finally:
            threading.excepthook = self._hook_before

    def _ignore_failed_writes(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, and raises its error again at the next `add_scalar`, where it is handled."""
        if not isinstance(failure.exc_value, OSError) or not type(failure.thread).__module__.startswith("tensorboard."):
            self._hook_before(failure)


class WeightsAndBiases:
    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        # A resumed run keeps its id; W&B ignores the metrics of repeated steps, which are the same.
        named = folder / WANDB_FILE
        if not named.exists():
            write_atomically(named, uuid.uuid4().hex.encode())
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            name=folder.name,
            config=config,
            id=named.read_text("utf-8"),
            resume="allow",
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def flush(self) -> None:
        """Nothing to do: W&B writes metrics in a separate process as they come."""

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, without an incomplete or damaged last one."""
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line.decode())
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("step"), int):
            raise UserError(f"{path}: line {number} has no step")
        found.append(content)
    return found


class Progress:
    """Shows steps as they complete: a progress bar on a terminal, lines elsewhere.

    Args:
        steps: of the whole run.
        quiet: show nothing; for all processes but the first.
    """

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        # The first step, and when it was made.
        self._first: tuple[int, float] | None = None
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

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int) -> None:
        """Called before the first step, after `done` steps of a resumed run."""
        if self._bar is not None:
            self._bar.reset(self._task, completed=done)

    def step(self, step: int, numbers: str | None) -> None:
        """Called after each step, with a line of metrics if there is a new one.

        The remaining time is estimated from the steps after the first, which includes start-up, such as compilation.
        """
        if self._first is None:
            self._first = step, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **({} if numbers is None else {"numbers": numbers}))
        elif numbers is not None:
            line = f"step {step:,} of {self._steps:,}  {numbers}"
            first, then = self._first
            if step > first:
                left = (time.monotonic() - then) / (step - first) * (self._steps - step)
                line += f"  {_duration(left)} left"
            self.say(line)

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
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
