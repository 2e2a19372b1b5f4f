"""Locks between processes: a file that one of them holds at a time and removes when it is done."""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from sympow.errors import UserError
from sympow.files import naming

# Errors of file systems without locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class HeldLock:
    """A lock that this process holds.

    Args:
        file: the lock's file.
        handle: the descriptor of the file, which holds the lock until it is closed.
    """

    def __init__(self, file: Path, handle: int) -> None:
        self._file, self._handle, self._note = file, handle, b""

    def write_note(self, note: str) -> None:
        """Writes who holds the lock; `read_note` reads it in other processes."""
        self._note = note.encode()
        with naming(self._file):
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
            # On Windows other processes cannot read the first byte, which is what is locked there.
            os.write(self._handle, b"\n" + self._note)

    def keep(self) -> None:
        """Takes the lock again if its file has been removed or replaced, since others then lock another file.

        Raises:
            BlockingIOError: another process has taken the lock meanwhile.
        """
        if _is_at(self._handle, self._file):
            return
        removed, self._handle = self._handle, _acquire(self._file, wait=False)
        os.close(removed)
        self.write_note(self._note.decode())

    def release(self) -> None:
        if os.name == "nt":
            # Windows removes no file that is open, in this process or another.
            os.close(self._handle)
            with suppress(OSError):
                self._file.unlink()
            return
        # Removed before the lock is released, and only if it is this lock's, so that no other process's file is
        # removed. The disk may be read-only by now.
        with suppress(OSError):
            if _is_at(self._handle, self._file):
                self._file.unlink()
        os.close(self._handle)


@contextmanager
def lock_file(file: Path, *, wait: bool = True) -> Iterator[HeldLock]:
    """Holds a lock while the block runs.

    The operating system releases the lock if the process is killed.

    Args:
        file: the lock's file, removed at the end. Missing parent folders are created.
        wait: whether to wait until another process that holds the lock has released it.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
        ValueError: there is a folder or a pipe in place of the file.
    """
    held = HeldLock(file, _acquire(file, wait))
    try:
        yield held
    finally:
        held.release()


def read_note(file: Path) -> str:
    """What the holder of a lock wrote about itself; empty if it has not yet, or does not hold the lock any more."""
    try:
        with file.open("rb", buffering=0) as note:
            note.seek(1)
            return note.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _acquire(file: Path, wait: bool) -> int:
    """Takes the lock; returns the file descriptor that holds it until it is closed."""
    while True:
        # Asked once: between two questions the holder may remove the file.
        with suppress(FileNotFoundError):
            mode = file.lstat().st_mode
            if not stat.S_ISREG(mode):
                # A pipe could be locked, but not read or written without waiting for another process.
                found = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise UserError(f"{file} must be a file, which keeps other processes out; it is {found}: remove it")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            # Another process has just removed the folder that it had created for its lock.
            continue
        try:
            taken = lock_descriptor(handle, blocking=wait)
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                warnings.warn(
                    f"the file system of {file.parent} has no locks: other commands can write there at the same time",
                    stacklevel=2,
                )
                return handle
            os.close(handle)
            raise
        if not taken:
            os.close(handle)
            raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", str(file))
        # While this process waited, the holder may have removed the file, and another may have created it anew.
        if _is_at(handle, file):
            return handle
        os.close(handle)


def _is_at(handle: int, file: Path) -> bool:
    """Whether the path still names the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False
