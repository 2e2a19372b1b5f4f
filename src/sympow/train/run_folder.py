"""The run folder: names of its files, and a lock that keeps two runs from writing to it."""

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sympow.errors import ArgumentError, StoppedError, UserError
from sympow.files import check_can_write, missing_folders, remove_empty
from sympow.locks import HeldLock, lock_file, read_note
from sympow.train.processes import Place

# Parent of run folders without --out.
RUNS = Path("runs")
LOCK_FILE = "run.lock"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EXPORT = "model"
TENSORBOARD = "tensorboard"
# What a run writes.
OWN = (LOCK_FILE, CONFIG_FILE, METRICS_FILE, CHECKPOINTS, EXPORT, TENSORBOARD, "wandb", "wandb-id")


class LostFolderError(StoppedError, RuntimeError):
    """Another process has taken the run folder, after the file of this run's lock had been removed."""


@dataclass(frozen=True)
class Claim:
    """A run folder that no other run writes to.

    Attributes:
        folder: the folder.
        lock: None in all processes but the first.
    """

    folder: Path
    lock: HeldLock | None

    def keep(self) -> None:
        """Takes the lock again if someone has removed its file: a second run would then be admitted.

        Raises:
            LostFolderError: a second run has been admitted.
        """
        if self.lock is None:
            return
        try:
            self.lock.keep()
        except BlockingIOError as error:
            raise LostFolderError(
                f"{self.folder / LOCK_FILE} was removed during the run, and {_holder(self.folder)} has taken the folder"
            ) from error


@contextmanager
def claimed_folder(out: Path | None, *, resume: bool, place: Place) -> Iterator[Claim]:
    """Locks the folder while the block runs. Rank 0 chooses and locks it for all processes.

    If the block fails before anything was written, the folder is removed again.

    Args:
        out: the folder; None: a new one under runs/, named by the time.
        resume: whether it may hold a run already, or other files.
    """
    with ExitStack() as held:
        claim, chosen = None, list[Any]([None, None])
        if place.first:
            try:
                claim = held.enter_context(_claim(out, resume))
                chosen[0] = claim.folder
            except (ValueError, OSError) as error:
                chosen[1] = error
        dist.broadcast_object_list(chosen)
        folder, problem = chosen
        if problem is not None:
            raise problem
        yield claim or Claim(folder, None)


@contextmanager
def _claim(out: Path | None, resume: bool) -> Iterator[Claim]:
    check_can_write("out", out or RUNS, "folder")
    folder, made = _make_new() if out is None else (out, missing_folders(out))
    folder.mkdir(parents=True, exist_ok=True)
    # On the way out the lock is released first: its file would keep the folder from being removed.
    with ExitStack() as held:
        held.callback(remove_empty, made)
        try:
            lock = held.enter_context(lock_file(folder / LOCK_FILE, wait=False))
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by {_holder(folder)}: stop that run first, or choose another folder"
            ) from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        lock.write_note(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        if not resume:
            _check_is_free(folder)
        yield Claim(folder, lock)


def _check_is_free(folder: Path) -> None:
    """Raises a ValueError for a folder with a run or with other files, among which those of a run would be lost."""
    if (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds a run already: resume it (--resume), or choose another folder")
    # A run that ended before its first step may have left files without a config.
    others = sorted(path.name for path in folder.iterdir() if path.name not in OWN and not path.name.startswith("."))
    if others:
        named = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise ArgumentError(
            "out", f"must be a new or empty folder, or that of a run; {folder} has other files ({named})"
        )


def _make_new() -> tuple[Path, list[Path]]:
    """Creates a folder under runs/ named by the time; returns it and the folders created, innermost first.

    mkdir is atomic, so that no two runs get the same one.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        made = missing_folders(RUNS)
        RUNS.mkdir(parents=True, exist_ok=True)
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        # FileNotFoundError: another run that was refused has just removed the parent it created.
        except (FileExistsError, FileNotFoundError):
            continue
        return folder, [folder, *made]
    raise AssertionError("unreachable")


def _holder(folder: Path) -> str:
    return read_note(folder / LOCK_FILE) or "another process"
