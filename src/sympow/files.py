"""Atomic writes: a reader sees either the old or the new content of a file, and a failed write keeps the old."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from sympow.errors import ArgumentError

PARTIAL_ENDING = ".partial"


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name of the file that is written to an OSError without one, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        # The name of a temporary file would say nothing to a user. An OSError of a message alone has no strerror.
        unnamed = error.filename is None or str(error.filename).endswith(PARTIAL_ENDING)
        if error.strerror is None or not unnamed:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file that is renamed to `path` when the block ends, and deleted if the block fails.

    A symbolic link is followed, so that it still points to what was written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # A device or a pipe is opened directly: it must not be replaced by a file. Opening a folder raises.
        with naming(target), target.open("wb") as file:
            yield file
        return
    # Each process and thread has its own temporary file.
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL_ENDING}")
    try:
        with naming(target):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(target.parent)


def flush(path: Path) -> None:
    """Calls fsync on a file or a folder, so that it survives a crash of the machine.

    Windows opens no folder for that, and flushes only files that are open for writing.
    """
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Writes a file atomically, and creates its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


def check_can_write(name: str, path: Path, kind: Literal["file", "folder"]) -> None:
    """Raises a ValueError for an output that cannot be written, before the work whose result would be lost.

    Args:
        name: the argument that gives the path, for the message.
        path: what will be written. Missing parent folders will be created.
        kind: what it will be.
    """
    if path.exists() and path.is_dir() != (kind == "folder"):
        found = "a folder" if path.is_dir() else "a file"
        raise ArgumentError(name, f"must name a {kind}, and {path} is {found}")
    there = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
    try:
        # Checking permissions is not enough: the file system may be read-only or full.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ArgumentError(
            name, f"must be a {kind} that can be written, and {path} cannot: {error.strerror}"
        ) from error


def missing_folders(folder: Path) -> list[Path]:
    """The folder and its parents that do not exist, innermost first: what creating it will create."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Removes folders that were created for nothing, from the innermost up to the first that is not empty."""
    for path in folders:
        try:
            path.rmdir()
        except OSError:
            # Not empty: this process, or another one, has written to it.
            return


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
