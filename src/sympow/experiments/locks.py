"""Locks between commands that share folders: of a file of results while it is rewritten, of a sweep in training."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sympow.train.run_folder import WITHOUT_LOCKS

LOCK_ENDING = ".lock"


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a file while the block runs. The kernel releases it if the process is killed.

    The lock is a hidden file beside it, since the file itself is replaced whenever it is written; removed at the end.

    Args:
        path: the file, which need not exist. Missing parent folders are created.
        wait: whether to wait until another process that holds the lock has released it.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    file = path.with_name(f".{path.name}{LOCK_ENDING}")
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = _acquire(file, wait)
    try:
        yield
    finally:
        # Before the lock is released, so that no other process's file is removed. The disk may be read-only by now.
        with suppress(OSError):
            file.unlink()
        os.close(handle)


def _acquire(file: Path, wait: bool) -> int:
    """Takes the lock; returns the file descriptor that holds it until it is closed."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                warnings.warn(
                    f"the file system of {file.parent} has no locks: other commands can write there at the same time",
                    stacklevel=2,
                )
                return handle
            os.close(handle)
            raise
        # While this process waited, the holder may have removed the file, and another may have created it anew.
        try:
            if os.path.samestat(os.fstat(handle), file.stat()):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)
