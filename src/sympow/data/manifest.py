"""The manifest of prepared data: what is in a folder, how it was made, and hashes to prove it.

Beside it lie, for every shard, two arrays in NumPy's own format:

- `NAME.tokens.npy`, uint16 or uint32, (tokens,): the documents one after the other, each ending in the boundary token;
- `NAME.index.npy`, int64, (documents, 3): a document's length, the number of its file among the shard's sources, and
  its position in that file (byte of the line, number of the row, or 0).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sympow.checks import check_at_least
from sympow.data.dataset import SPLITS
from sympow.files import write_atomically
from sympow.parsing import read_json

MANIFEST_FILE = "manifest.json"
TOKENS_ENDING = ".tokens.npy"
INDEX_ENDING = ".index.npy"
FORMAT = "sympow-tokens"
VERSION = 1
DTYPES = ("uint16", "uint32")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """A piece of the data, in two files.

    Attributes:
        name: of the files, without their endings.
        documents: how many.
        tokens: how many, boundaries counted.
        tokens_sha256: of the file of tokens.
        index_sha256: of the file that says where documents begin and come from.
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
            raise ValueError(f"a shard's name must be letters, digits, dots, dashes and underscores; got {self.name!r}")
        for field in ("documents", "tokens"):
            check_at_least(f"{field} of {self.name}", getattr(self, field), 1)
        for field in ("tokens_sha256", "index_sha256"):
            value = getattr(self, field)
            if not isinstance(value, str) or not SHA256.fullmatch(value):
                raise ValueError(f"{field} of {self.name} must be 64 hexadecimal digits, got {value!r}")
        if not all(isinstance(source, str) for source in self.sources):
            raise TypeError(f"sources of {self.name} must be texts")

    @property
    def tokens_file(self) -> str:
        return self.name + TOKENS_ENDING

    @property
    def index_file(self) -> str:
        return self.name + INDEX_ENDING

    @classmethod
    def from_dict(cls, content: Any) -> Shard:
        if not isinstance(content, dict) or content.keys() != {field.name for field in fields(cls)}:
            raise ValueError(f"a shard must have {', '.join(field.name for field in fields(cls))}; got {content!r:.80}")
        if not isinstance(content["sources"], list | tuple):
            raise TypeError(f"sources of a shard must be a list, got {type(content['sources']).__name__}")
        return cls(**{**content, "sources": tuple(content["sources"])})


@dataclass(frozen=True)
class Manifest:
    """What a folder of prepared data holds.

    Attributes:
        tokenizer: its kind, vocab_size and boundary.
        dtype: of the tokens, "uint16" or "uint32".
        counts: files, files_ignored, source_bytes, documents, empty_documents_skipped, tokens; documents_cut_in_two,
            where the end of a single document is held out.
        request: how it was made; the same request finds its work done.
        splits: shards of "train" and "heldout".
    """

    tokenizer: dict[str, Any]
    dtype: str
    counts: dict[str, Any]
    request: dict[str, Any]
    splits: dict[str, tuple[Shard, ...]]

    def __post_init__(self) -> None:
        for name in ("tokenizer", "counts", "request", "splits"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name} must map names to values, got {type(getattr(self, name)).__name__}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        vocab_size: Any = self.tokenizer.get("vocab_size")
        boundary: Any = self.tokenizer.get("boundary")
        check_at_least("vocab_size", vocab_size, 1)
        check_at_least("boundary", boundary, 0)
        if boundary >= vocab_size:
            raise ValueError(f"boundary must be below vocab_size={vocab_size}, got {boundary}")
        for name, count in self.counts.items():
            if not isinstance(count, int | list):
                raise TypeError(f"counts must be numbers or lists, got {name}={count!r:.80}")
        if self.splits.keys() != set(SPLITS):
            raise ValueError(f"splits must be {' and '.join(SPLITS)}, got {', '.join(map(str, self.splits))}")

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(folder / MANIFEST_FILE, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST_FILE
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a manifest of prepared data")
        if (version := content.pop("version", None)) != VERSION:
            raise ValueError(f"{path} has version {version}; this program reads version {VERSION}")
        expected = {field.name for field in fields(cls)}
        if content.keys() != expected:
            differing = ", ".join(sorted(content.keys() ^ expected))
            raise ValueError(f"{path} is a damaged manifest: it lacks or has too much of {differing}")
        try:
            return cls(**{**content, "splits": _shards(content["splits"])})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged manifest: {error}") from error


def _shards(splits: Any) -> dict[str, tuple[Shard, ...]]:
    if not isinstance(splits, dict) or not all(isinstance(shards, list) for shards in splits.values()):
        raise TypeError("splits must map names to lists of shards")
    return {name: tuple(map(Shard.from_dict, shards)) for name, shards in splits.items()}
