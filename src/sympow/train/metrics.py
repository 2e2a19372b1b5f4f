"""Numbers of a run: a JSONL file always, TensorBoard events and Weights & Biases if asked for."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from sympow.extras import require
from sympow.files import write_atomically

WANDB_FILE = "wandb-id"


class Writer(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def flush(self) -> None:
        """Puts what was written where a killed process leaves it: before a checkpoint, from which a run goes on."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """One line per step, flushed, so that a killed run has all of them; a resumed one goes on after its checkpoint."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        # Steps after the checkpoint will be made again.
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_at] if path.exists() else []
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        # Without a buffer: what could not be written would be tried again on closing.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        line = memoryview((json.dumps({"step": step, **numbers}) + "\n").encode())
        with _naming(self._file.name):
            while line:
                line = line[self._file.write(line) :]

    def flush(self) -> None:
        with _naming(self._file.name):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path, resumed_at: int) -> None:
        require("tensorboard", "train")
        from torch.utils.tensorboard import SummaryWriter

        self._folder = str(folder)
        self._hook_before = threading.excepthook
        threading.excepthook = self._leave_out_failed_writes
        # What a killed run wrote after its checkpoint is hidden.
        self._writer = SummaryWriter(self._folder, purge_step=resumed_at + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        with _naming(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        with _naming(self._folder):
            self._writer.flush()

    def close(self) -> None:
        try:
            with _naming(self._folder):
                self._writer.close()
        finally:
            threading.excepthook = self._hook_before

    def _leave_out_failed_writes(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, and raises what failed there once more when it is next given a number."""
        if not isinstance(failure.exc_value, OSError) or not type(failure.thread).__module__.startswith("tensorboard."):
            self._hook_before(failure)


class WeightsAndBiases:
    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        # A resumed run goes on under the same id; numbers of steps made again are the same, and are left out there.
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
        """Nothing to do: a process of its own takes the numbers as they come."""

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """What fails to be written is named."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; without the last one, if it was cut off."""
    lines = Path(path).read_text("utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("step"), int):
            raise ValueError(f"{path}: line {number} has no step")
        found.append(content)
    return found
