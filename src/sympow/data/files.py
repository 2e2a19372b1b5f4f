"""Writing files so that a reader, or a run that goes on after an interruption, never sees half of one; reading them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

PARTIAL_ENDING = ".partial"


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """All of it under that name, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two runs apart, should somebody start both.
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_ENDING}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Onto the disk, not only to the system: a machine may stop."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
