"""Token shards on disk: `ShardDataset` memory-maps those that `prepare` wrote, and `save_shard` writes one."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_choice
from sympow.data.dataset import SPLITS, StoredDocuments, Tokens
from sympow.data.formats.token_file import file_size, map_array
from sympow.data.manifest import INDEX_ENDING, TOKENS_ENDING, Manifest, TokenShard, verify
from sympow.data.row_order import group_by_size
from sympow.data.sources import describe_position
from sympow.data.tokenizer import Tokenizer, load_tokenizer
from sympow.errors import UserError
from sympow.files import write_atomically

# Any document is quick to read from any shard, so blocks could be smaller; but each may end in an incomplete row.
BLOCK_TOKENS = 2**26
# What np.save writes: version 1.0 of the format, and a header in Python syntax, padded with spaces.
MAGIC = b"\x93NUMPY\x01\x00"
HEADER = re.compile(
    rb"\{'descr': '(?P<dtype><[ui]\d)', 'fortran_order': False, 'shape': \((?P<shape>\d{1,18},(?: \d{1,18})?)\), \} *\n"
)


class ShardDataset(StoredDocuments):
    """One split of a folder that `prepare` wrote. A block is a few consecutive shards.

    Opening reads the index and maps the tokens. The first opening also verifies the hashes of all files
    (`sympow.data.manifest`), so that a damaged or missing shard is found at once.

    Args:
        folder: the `out` of `prepare`.
        split: "train" or "heldout".
    """

    def __init__(self, folder: Path | str, split: str = "train") -> None:
        check_choice("split", split, SPLITS)
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        self.shards = self.manifest.splits[split]
        if not self.shards:
            raise UserError(
                f"{folder} has no split {split!r}: prepare it again with some held out (--heldout, --overwrite)"
            )
        self.vocab_size: int = self.manifest.tokenizer["vocab_size"]
        self.boundary: int = self.manifest.tokenizer["boundary"]
        tokens = [self._map_tokens(shard) for shard in self.shards]
        indices = [self._read_index(shard) for shard in self.shards]
        super().__init__(f"{folder} ({split})", tokens, [index[:, 0] for index in indices])
        verify(self.folder, self._hashes())
        self._index = np.concatenate(indices)
        firsts = group_by_size((shard.tokens for shard in self.shards), BLOCK_TOKENS)
        begins = [self._first_documents[shard] for shard in firsts]
        self.blocks: NDArray[np.int64] = np.array([*begins, len(self.lengths)])
        contents = [(shard.tokens_sha256, shard.index_sha256) for shard in self.shards]
        self.fingerprint = hashlib.sha256(json.dumps([self.manifest.tokenizer, contents]).encode()).hexdigest()[:16]

    def document_name(self, document: int) -> str:
        _, source, position = self._index[document].tolist()
        return describe_position(self.shards[self._array_of(document)].sources[source], position)

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def verify(self) -> None:
        """Reads every shard and compares it with its hash in the manifest, even if that was done before."""
        verify(self.folder, self._hashes(), again=True)

    def _hashes(self) -> dict[str, str]:
        return {
            file: digest
            for shard in self.shards
            for file, digest in ((shard.tokens_file, shard.tokens_sha256), (shard.index_file, shard.index_sha256))
        }

    def _map_tokens(self, shard: TokenShard) -> Tokens:
        path, dtype = self.folder / shard.tokens_file, self.manifest.dtype
        return map_array(path, dtype, _find_content(path, np.dtype(dtype), (shard.tokens,)))

    def _read_index(self, shard: TokenShard) -> NDArray[np.int64]:
        path = self.folder / shard.index_file
        dtype, shape = np.dtype(np.int64), (shard.documents, 3)
        offset = _find_content(path, dtype, shape)
        index = np.fromfile(path, dtype, math.prod(shape), offset=offset).reshape(shape)
        lengths, sources, positions = index.T
        # The maximum is checked too, since the sum could overflow and wrap around.
        fits = lengths.min() > 0 and lengths.max() <= shard.tokens and lengths.sum() == shard.tokens
        if not fits or sources.min() < 0 or sources.max() >= len(shard.sources) or positions.min() < 0:
            raise UserError(
                f"{path} must have the positions of {shard.documents:,} documents with {shard.tokens:,} tokens in all"
            )
        return index


def _find_content(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The offset of an array in its file, whose header and size must match the manifest.

    NumPy's own reader would allocate as much memory as the header says, and evaluate the header as Python.
    """
    size, content = file_size(path), math.prod(shape) * dtype.itemsize
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 2)
        header = file.read(int.from_bytes(start[len(MAGIC) :], "little"))
    found = HEADER.fullmatch(header)
    if not start.startswith(MAGIC) or found is None:
        raise UserError(f"{path} is not a readable shard: it has no header of a numeric array")
    described = found["dtype"].decode(), tuple(map(int, found["shape"].replace(b",", b" ").split()))
    if described != (dtype.str, shape) or size != len(start) + len(header) + content:
        raise UserError(
            f"{path} must be {dtype} of shape {shape} by the manifest, in a file of "
            f"{len(start) + len(header) + content:,} bytes; got {described[0]} of shape {described[1]} in {size:,}"
        )
    return len(start) + len(header)


def save_shard(
    folder: Path, name: str, documents: Sequence[tuple[NDArray[Any], str, int]], tokenizer: Tokenizer
) -> TokenShard:
    """Writes a shard.

    Args:
        folder: where to.
        name: of the shard.
        documents: ids, (tokens,), without boundary, the source that they come from, and the position in it.
        tokenizer: what made the ids.
    """
    dtype = id_dtype(tokenizer.vocab_size)
    boundary = np.array([tokenizer.boundary], dtype)
    tokens = np.concatenate([part.astype(dtype) for ids, _, _ in documents for part in (ids, boundary)])
    sources = tuple(dict.fromkeys(source for _, source, _ in documents))
    numbers = {source: number for number, source in enumerate(sources)}
    index = np.array([(len(ids) + 1, numbers[source], position) for ids, source, position in documents], np.int64)
    return TokenShard(
        name,
        documents=len(index),
        tokens=len(tokens),
        tokens_sha256=_save_array(folder / f"{name}{TOKENS_ENDING}", tokens),
        index_sha256=_save_array(folder / f"{name}{INDEX_ENDING}", index),
        sources=sources,
    )


def _save_array(path: Path, array: NDArray[Any]) -> str:
    """Writes an array and returns the hash of its file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    content = buffer.getbuffer()
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
