"""The run folder: names of its files, and a lock that keeps two runs from writing to it."""

import errno
import fcntl
import itertools
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sympow.files import check_can_write
from sympow.train.distributed import Place

# Parent of run folders without --out.
RUNS = Path("runs")
LOCK_FILE = "run.lock"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EXPORT = "model"
# Errors of file systems without locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
    lock = _lock(folder)
    try:
        if not resume and (folder / CONFIG_FILE).exists():
            raise ValueError(f"{folder} holds a run already: resume it, or choose another folder")
        yield folder
    finally:
        # Before the lock is released, so that no other run's file is removed. The disk may be read-only by now.
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        os.close(lock)
        _remove_if_empty(made)


def _make(folder: Path) -> tuple[Path, list[Path]]:
    """Creates the folder; returns it and the folders created, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
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


def _lock(folder: Path) -> int:
    """Takes the lock; returns the file descriptor that holds it until it is closed."""
    file = folder / LOCK_FILE
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            # Another run that was refused has just removed the folder.
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The locked file may have been removed meanwhile and another created with its name.
            if _is_file_of(handle, file):
                _write_holder(handle)
                return handle
        except BlockingIOError as error:
            # Empty: the holder has locked the file and not yet written to it.
            holder = os.pread(handle, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            message = f"{folder} is in use by {holder}: stop that run first, or choose another folder"
            raise ValueError(message) from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                os.close(handle)
                raise
            warnings.warn(
                f"the file system of {folder} has no locks: another run can write to it at the same time",
                stacklevel=2,
            )
            return handle
        os.close(handle)


def _write_holder(handle: int) -> None:
    """Writes who holds the lock, for the error message of other runs."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)


def _is_file_of(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _remove_if_empty(made: list[Path]) -> None:
    """Removes the folders created for a run that wrote nothing."""
    for path in made:
        try:
            path.rmdir()
        except OSError:
            # Not empty: this run, or another one, has written to it.
            return
