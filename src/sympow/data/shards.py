"""Prepared data: memory-mapped shards beside their manifest."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_choice
from sympow.data.checks import SPLITS, check_range
from sympow.data.dataset import Tokens
from sympow.data.files import sha256_of
from sympow.data.grouping import group_by_size
from sympow.data.manifest import Manifest, Shard
from sympow.data.sources import describe_position
from sympow.data.tokenizer import Tokenizer, load_tokenizer

# Any document is quick to read from any shard, so blocks could be small; but each may leave an incomplete row.
BLOCK_TOKENS = 2**26


class ShardDataset:
    """One split of a folder that `prepare` wrote. A block is a few shards that follow each other.

    Opening reads the index and maps the tokens without reading them; a damaged or missing shard shows here.

    Args:
        folder: what was given to `prepare` as `out`.
        split: "train" or "heldout".
    """

    def __init__(self, folder: Path | str, split: str = "train") -> None:
        check_choice("split", split, SPLITS)
        self.folder = Path(folder)
        self.name = f"{folder} ({split})"
        self.manifest = Manifest.load(self.folder)
        self.shards = self.manifest.splits[split]
        if not self.shards:
            raise ValueError(
                f"{folder} has no split {split!r}: prepare it again with a share to hold out (--heldout, --overwrite)"
            )
        self.vocab_size: int = self.manifest.tokenizer["vocab_size"]
        self.boundary: int = self.manifest.tokenizer["boundary"]
        self._tokens = [self._map_tokens(shard) for shard in self.shards]
        indices = [self._read_index(shard) for shard in self.shards]
        self._index = np.concatenate(indices)
        self.lengths: NDArray[np.int64] = np.ascontiguousarray(self._index[:, 0])
        # Where each document begins in its shard.
        self._starts = np.concatenate([np.cumsum(index[:, 0]) - index[:, 0] for index in indices])
        self._first_documents: list[int] = np.cumsum([0, *map(len, indices)])[:-1].tolist()
        groups = group_by_size(range(len(self.shards)), lambda shard: self.shards[shard].tokens, BLOCK_TOKENS)
        first_documents = [self._first_documents[group[0]] for group in groups]
        self.blocks: NDArray[np.int64] = np.array([*first_documents, len(self.lengths)])
        contents = [(shard.tokens_sha256, shard.index_sha256) for shard in self.shards]
        self.fingerprint = hashlib.sha256(json.dumps([self.manifest.tokenizer, contents]).encode()).hexdigest()[:16]

    def read(self, document: int, start: int, stop: int) -> Tokens:
        check_range(f"document {document} of {self.name}", start, stop, self.lengths[document])
        begin = self._starts[document]
        return self._tokens[self._shard_of(document)][begin + start : begin + stop]

    def document_name(self, document: int) -> str:
        _, source, position = self._index[document].tolist()
        return describe_position(self.shards[self._shard_of(document)].sources[source], position)

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def verify(self) -> None:
        """Reads every shard and compares it with its hash in the manifest."""
        for shard in self.shards:
            for file, expected in (
                (shard.tokens_file, shard.tokens_sha256),
                (shard.index_file, shard.index_sha256),
            ):
                path = self.folder / file
                if sha256_of(path) != expected:
                    raise ValueError(f"{path} is damaged: its content does not have the hash that the manifest names")

    def _shard_of(self, document: int) -> int:
        return bisect_right(self._first_documents, document) - 1

    def _map_tokens(self, shard: Shard) -> Tokens:
        path = self.folder / shard.tokens_file
        mapped = _load(path, mmap_mode="r")
        if mapped.dtype != self.manifest.dtype or mapped.shape != (shard.tokens,):
            raise ValueError(
                f"{path} must be {self.manifest.dtype} with {shard.tokens:,} tokens by the manifest, "
                f"got {mapped.dtype} of shape {mapped.shape}"
            )
        # As a plain array: slicing np.memmap costs several times as much.
        return np.asarray(mapped)

    def _read_index(self, shard: Shard) -> NDArray[np.int64]:
        path = self.folder / shard.index_file
        index = _load(path)
        if index.dtype != np.int64 or index.shape != (shard.documents, 3) or index[:, 0].sum() != shard.tokens:
            raise ValueError(
                f"{path} must give the places of {shard.documents:,} documents with {shard.tokens:,} tokens in all"
            )
        return index


def _load(path: Path, mmap_mode: Any = None) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a readable shard: {error}") from error
