"""Locks between processes: a file that one of them holds at a time and removes when it is done."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_ENDING = ".lock"
# Errors of file systems without locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def lock_file(file: Path, *, wait: bool = True) -> Iterator[int]:
    """Holds a lock while the block runs; yields the descriptor of its file, in which the holder may leave its name.

    The kernel releases the lock if the process is killed.

    Args:
        file: the lock's file, removed at the end. Missing parent folders are created.
        wait: whether to wait until another process that holds the lock has released it.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    handle = _acquire(file, wait)
    try:
        yield handle
    finally:
        # Before the lock is released, so that no other process's file is removed. The disk may be read-only by now.
        with suppress(OSError):
            file.unlink()
        os.close(handle)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a file, which need not exist, while the block runs; arguments are those of `lock_file`.

    The lock is a hidden file beside it, since the file itself is replaced whenever it is written.
    """
    with lock_file(path.with_name(f".{path.name}{LOCK_ENDING}"), wait=wait):
        yield


def _acquire(file: Path, wait: bool) -> int:
    """Takes the lock; returns the file descriptor that holds it until it is closed."""
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            # Another process has just removed the folder that it had created for its lock.
            continue
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
