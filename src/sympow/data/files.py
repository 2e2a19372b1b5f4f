"""Files that are written as a whole, or hashed, and outputs that are checked before the work."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Literal

from sympow.atomic import replacing


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
