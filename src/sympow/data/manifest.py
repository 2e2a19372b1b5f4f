"""The manifest of prepared data: its shards, how they were made, their hashes, and the verification of these.

Beside it are, for every shard, two arrays in NumPy's format:

- `NAME.tokens.npy`, uint16 or uint32, (tokens,): the documents one after the other, each ending in the boundary token;
- `NAME.index.npy`, int64, (documents, 3): a document's length, the number of its source among the shard's, and its
  row there, 0 for a text.

`verified.json` lists the files whose hashes were verified, with size and modification times, so that hashing is done
once and not at every opening. A copy of the data has other times and is verified again: copying is when files are
damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sympow.checks import check_at_least, check_regular_file
from sympow.data.dataset import SPLITS
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.files import sha256_of, write_atomically
from sympow.parsing import read_json

MANIFEST_FILE = "manifest.json"
# Of an unfinished preparation.
WORK_FOLDER = ".prepare"
TOKENS_ENDING = ".tokens.npy"
INDEX_ENDING = ".index.npy"
FORMAT = "sympow-tokens"
VERSION = 1
DTYPES = ("uint16", "uint32")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
SHA256 = re.compile("[0-9a-f]{64}")
VERIFIED_FILE = "verified.json"
# hashlib releases the GIL, and one core hashes about as fast as one disk reads.
HASHING_THREADS = 4


@dataclass(frozen=True)
class TokenShard:
    """A shard of the data, in two files.

    Attributes:
        name: of the files, without their endings.
        documents: how many.
        tokens: how many, boundary tokens included.
        tokens_sha256: of the file of tokens.
        index_sha256: of the file with lengths and sources of documents.
        sources: files that the documents come from.
    """

    name: str
    documents: int
    tokens: int
    tokens_sha256: str
    index_sha256: str
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            # A path would lead out of the folder.
            raise UserError(f"a shard's name must be letters, digits, dots, dashes and underscores; got {self.name!r}")
        for field in ("documents", "tokens"):
            check_at_least(f"{field} of {self.name}", getattr(self, field), 1)
        for field in ("tokens_sha256", "index_sha256"):
            value = getattr(self, field)
            if not isinstance(value, str) or not SHA256.fullmatch(value):
                raise ArgumentError(field, f"of {self.name} must be 64 hexadecimal digits, got {value!r}")
        if not all(isinstance(source, str) for source in self.sources):
            raise ArgumentTypeError("sources", f"of {self.name} must be strings")

    @property
    def tokens_file(self) -> str:
        return self.name + TOKENS_ENDING

    @property
    def index_file(self) -> str:
        return self.name + INDEX_ENDING

    @classmethod
    def from_dict(cls, content: Any) -> TokenShard:
        if not isinstance(content, dict) or content.keys() != {field.name for field in fields(cls)}:
            raise UserError(f"a shard must have {', '.join(field.name for field in fields(cls))}; got {content!r:.80}")
        if not isinstance(content["sources"], list | tuple):
            raise ArgumentTypeError("sources", f"of a shard must be a list, got {type(content['sources']).__name__}")
        return cls(**{**content, "sources": tuple(content["sources"])})


@dataclass(frozen=True)
class Manifest:
    """What a folder of prepared data holds.

    Attributes:
        tokenizer: its kind, vocab_size and boundary.
        dtype: of the tokens, "uint16" or "uint32".
        counts: files, files_ignored, source_bytes, documents, empty_documents_skipped, tokens; documents_cut_in_two,
            where the end of a single document is held out.
        request: the arguments of `prepare`; the same request again does nothing.
        splits: shards of "train" and "heldout".
    """

    tokenizer: dict[str, Any]
    dtype: str
    counts: dict[str, Any]
    request: dict[str, Any]
    splits: dict[str, tuple[TokenShard, ...]]

    def __post_init__(self) -> None:
        for name in ("tokenizer", "counts", "request"):
            if not isinstance(getattr(self, name), dict):
                raise ArgumentTypeError(name, f"must map names to values, got {type(getattr(self, name)).__name__}")
        if self.dtype not in DTYPES:
            raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        vocab_size: Any = self.tokenizer.get("vocab_size")
        boundary: Any = self.tokenizer.get("boundary")
        check_at_least("vocab_size", vocab_size, 1)
        check_at_least("boundary", boundary, 0)
        if boundary >= vocab_size:
            raise ArgumentError("boundary", f"must be below vocab_size={vocab_size}, got {boundary}")
        for name, count in self.counts.items():
            if not isinstance(count, int | list):
                raise ArgumentTypeError("counts", f"must be numbers or lists, got {name}={count!r:.80}")
        if self.splits.keys() != set(SPLITS):
            raise ArgumentError("splits", f"must be {' and '.join(SPLITS)}, got {', '.join(map(str, self.splits))}")

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(folder / MANIFEST_FILE, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST_FILE
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise UserError(f"{path} is not a manifest of prepared data")
        if (version := content.pop("version", None)) != VERSION:
            raise UserError(f"{path} has version {version}; this program reads version {VERSION}")
        expected = {field.name for field in fields(cls)}
        if content.keys() != expected:
            differing = ", ".join(sorted(content.keys() ^ expected))
            raise UserError(f"{path} is a damaged manifest: missing or unknown fields: {differing}")
        try:
            return cls(**{**content, "splits": _shards(content["splits"])})
        except (TypeError, ValueError) as error:
            raise UserError(f"{path} is a damaged manifest: {error}") from error


def _shards(splits: Any) -> dict[str, tuple[TokenShard, ...]]:
    if not isinstance(splits, dict) or not all(isinstance(shards, list) for shards in splits.values()):
        raise ArgumentTypeError("splits", "must map names to lists of shards")
    return {name: tuple(map(TokenShard.from_dict, shards)) for name, shards in splits.items()}


def verify(folder: Path, expected: Mapping[str, str], *, again: bool = False) -> None:
    """Compares files with their hashes, and notes the result in `verified.json`.

    Args:
        folder: where the files are.
        expected: SHA-256 by the file's name.
        again: also files that were verified and have not changed since.

    Raises:
        ValueError: a file does not have its hash.
    """
    known = {} if again else _read_verified(folder)
    # Before the files are read, so that a change meanwhile is noticed at the next opening.
    states = {name: _state(folder / name, digest) for name, digest in expected.items()}
    pending = [name for name in expected if known.get(name) != states[name]]
    if not pending:
        return
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        found = threads.map(lambda name: sha256_of(folder / name), pending)
        for name, digest in zip(pending, found, strict=True):
            if digest != expected[name]:
                raise UserError(f"{folder / name} is damaged: its content does not match the hash in the manifest")
    content = json.dumps({**_read_verified(folder), **states}, indent=1).encode()
    for path in _verified_paths(folder):
        # If it cannot be written, the next opening verifies again.
        with suppress(OSError):
            write_atomically(path, content)
            return


def _state(path: Path, digest: str) -> list[Any]:
    """The entry of a file in `verified.json`. Its ctime changes with any change, and cannot be set by a program."""
    status = path.stat()
    return [digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_verified(folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for path in _verified_paths(folder):
        if not path.exists():
            continue
        check_regular_file(path)
        # An unreadable file counts as empty, and is replaced.
        with suppress(ValueError):
            content = read_json(path)
            known |= content if isinstance(content, dict) else {}
    return known


def _verified_paths(folder: Path) -> list[Path]:
    """Beside the data, or in the user's cache folder where the data are read-only."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    elsewhere = [caches / "sympow" / f"verified-{name}.json"] if caches.is_absolute() else []
    return [folder / VERIFIED_FILE, *elsewhere]
