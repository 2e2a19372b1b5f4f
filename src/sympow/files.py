"""Atomic file replacement: a reader sees the old content or the new one, and a failed write keeps the old one."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

PARTIAL_ENDING = ".partial"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to that takes the name `path` when the block ends, and vanishes if the block fails.

    A link is followed, so that it still leads to what was written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # A device or a pipe has no content to lose, and must not be replaced by a file. A folder raises.
        with target.open("wb") as file:
            yield file
        return
    # Processes and threads that write the same file do not write into each other's.
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL_ENDING}")
    try:
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
    """Writes a file, or the entries of a folder, from the system's memory to the disk: a machine may stop."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """All of it under that name, or nothing; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


def check_can_write(name: str, path: Path, kind: Literal["file", "folder"]) -> None:
    """Refuses an output that could not be written, before the work whose result would be lost.

    Args:
        name: of the argument that names it.
        path: what will be written; what is missing of its folders will be made.
        kind: what it will be.
    """
    if path.exists() and path.is_dir() != (kind == "folder"):
        found = "a folder" if path.is_dir() else "a file"
        raise ValueError(f"{name} must name a {kind}, and {path} is {found}")
    there = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
    try:
        # Permissions alone do not tell: a file system may be mounted for reading, or hold no files at all.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{name} must be a {kind} that can be written, and {path} cannot: {error.strerror}") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
