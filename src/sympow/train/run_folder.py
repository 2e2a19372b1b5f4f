"""The run folder: names of its files, and a lock that keeps two runs from writing to it."""

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sympow.files import check_can_write, missing_folders, remove_empty
from sympow.locks import lock_file
from sympow.train.distributed import Place

# Parent of run folders without --out.
RUNS = Path("runs")
LOCK_FILE = "run.lock"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EXPORT = "model"


@contextmanager
def claimed_folder(out: Path | None, *, resume: bool, place: Place) -> Iterator[Path]:
    """Locks the folder while the block runs. Rank 0 chooses and locks it for all processes.

    If the block fails before anything was written, the folder is removed again.

    Args:
        out: the folder; None: a new one under runs/, named by the time.
        resume: whether it may hold a run already.
    """
    with ExitStack() as held:
        chosen: list[Any] = [None, None]
        if place.first:
            try:
                chosen[0] = held.enter_context(_claim(out, resume))
            except (ValueError, OSError) as error:
                chosen[1] = str(error)
        dist.broadcast_object_list(chosen)
        folder, problem = chosen
        if problem is not None:
            raise ValueError(problem)
        yield folder


@contextmanager
def _claim(out: Path | None, resume: bool) -> Iterator[Path]:
    check_can_write("out", out or RUNS, "folder")
    folder, made = _make_new() if out is None else _make(out)
    # On the way out the lock is released first: its file would keep the folder from being removed.
    with ExitStack() as held:
        held.callback(remove_empty, made)
        held.enter_context(_lock(folder))
        if not resume and (folder / CONFIG_FILE).exists():
            raise ValueError(f"{folder} holds a run already: resume it (--resume), or choose another folder")
        yield folder


def _make(folder: Path) -> tuple[Path, list[Path]]:
    """Creates the folder; returns it and the folders created, innermost first."""
    missing = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder, missing


def _make_new() -> tuple[Path, list[Path]]:
    """Creates a folder under runs/ named by the time; mkdir is atomic, so that no two runs get the same one."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        _, made = _make(RUNS)
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        # FileNotFoundError: another run that was refused has just removed the parent it created.
        except (FileExistsError, FileNotFoundError):
            continue
        return folder, [folder, *made]
    raise AssertionError("unreachable")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds the lock of a run folder; raises a ValueError that names the process that has it."""
    file = folder / LOCK_FILE
    with ExitStack() as held:
        try:
            handle = held.enter_context(lock_file(file, wait=False))
        except BlockingIOError as error:
            message = f"{folder} is in use by {_holder(file)}: stop that run first, or choose another folder"
            raise ValueError(message) from error
        _write_holder(handle)
        yield


def _write_holder(handle: int) -> None:
    """Writes who holds the lock, for the error message of other runs."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)


def _holder(file: Path) -> str:
    # Empty: the holder has locked the file and not yet written to it. Missing: it has just ended.
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except FileNotFoundError:
        return "another process"
