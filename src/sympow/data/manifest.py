"""The manifest of prepared data: what is in a folder, how it was made, and hashes to prove it.

Beside it lie, for every shard, two arrays in NumPy's own format:

- `NAME.tokens.npy`, uint16 or uint32, (tokens,): the documents one after the other, each ending in the boundary token;
- `NAME.index.npy`, int64, (documents, 3): a document's length, the number of its file among the shard's sources, and
  its position in that file (byte of the line, number of the row, or 0).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sympow.data.files import write_atomically

MANIFEST_FILE = "manifest.json"
TOKENS_ENDING = ".tokens.npy"
INDEX_ENDING = ".index.npy"
FORMAT = "sympow-tokens"
VERSION = 1


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

    @property
    def tokens_file(self) -> str:
        return self.name + TOKENS_ENDING

    @property
    def index_file(self) -> str:
        return self.name + INDEX_ENDING

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Shard:
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

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(folder / MANIFEST_FILE, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST_FILE
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a readable manifest: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a manifest of prepared data")
        if (version := content.pop("version", None)) != VERSION:
            raise ValueError(f"{path} has version {version}; this program reads version {VERSION}")
        splits = {name: tuple(map(Shard.from_dict, shards)) for name, shards in content.pop("splits").items()}
        return cls(**content, splits=splits)
