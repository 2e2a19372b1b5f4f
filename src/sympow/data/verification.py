"""Which files of prepared data were compared with their hashes, so that it is done once and not at every opening.

A record beside the data names every file that was found to be as the manifest says, with its size and its times of
change. A copy of the data has other times, and is read again: copying is when files are damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from sympow.checks import check_regular_file
from sympow.files import sha256_of, write_atomically
from sympow.parsing import read_json

RECORD_FILE = "verified.json"
# Hashing leaves Python's lock, and one core hashes about as fast as one disk reads.
THREADS = 4


def verify_once(folder: Path, expected: Mapping[str, str]) -> None:
    """Compares files with their hashes, unless the record says that it was done and they did not change since.

    Args:
        folder: where the files are.
        expected: SHA-256 by the file's name.

    Raises:
        ValueError: a file is not the one that was hashed.
    """
    known = _read_record(folder)
    pending = {name: digest for name, digest in expected.items() if known.get(name) != _state(folder / name, digest)}
    if pending:
        verify(folder, pending)


def verify(folder: Path, expected: Mapping[str, str]) -> None:
    """Compares files with their hashes, and records it.

    Args:
        folder: where the files are.
        expected: SHA-256 by the file's name.

    Raises:
        ValueError: a file is not the one that was hashed.
    """
    # Before they are read: what changes meanwhile is another file.
    states = {name: _state(folder / name, digest) for name, digest in expected.items()}
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda name: sha256_of(folder / name), expected)
        for name, digest in zip(expected, found, strict=True):
            if digest != expected[name]:
                raise ValueError(
                    f"{folder / name} is damaged: its content does not have the hash that the manifest names"
                )
    content = json.dumps({**_read_record(folder), **states}, indent=1).encode()
    for path in _record_paths(folder):
        # Without a record, the next opening reads the files again.
        with suppress(OSError):
            write_atomically(path, content)
            return


def _state(path: Path, digest: str) -> list[Any]:
    """What the record says of a file. The time of its inode changes when anything else does, and cannot be set."""
    status = path.stat()
    return [digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_record(folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for path in _record_paths(folder):
        if not path.exists():
            continue
        check_regular_file(path)
        # One that cannot be read says nothing, and is replaced.
        with suppress(ValueError):
            content = read_json(path)
            known |= content if isinstance(content, dict) else {}
    return known


def _record_paths(folder: Path) -> list[Path]:
    """Beside the data, or, where that can only be read, among the user's caches."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    elsewhere = [caches / "sympow" / f"verified-{name}.json"] if caches.is_absolute() else []
    return [folder / RECORD_FILE, *elsewhere]
