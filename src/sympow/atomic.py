"""Atomic file replacement: a reader sees the old content or the new one, and a failed write keeps the old one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
