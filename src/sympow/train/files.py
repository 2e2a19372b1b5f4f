"""Small files that are whole or not there, however a run ends."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside its place, onto the disk, and moves it there: a reader finds the old text or the new one."""
    beside = path.with_name(path.name + ".unfinished")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Onto the disk, not only to the system: a machine may stop."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
