"""LongCrawl64 as published: zarr arrays of GPT-2 ids, a row of 65,536 tokens per document.

A zarr chunk holds some columns of 2,048 rows, so that reading one row decodes its 2,047 neighbours. Decoded chunks are
therefore cached, and the rows of a chunk make a block: reading block after block, in any order inside, decodes every
chunk once.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least, check_at_most, check_choice
from sympow.data.dataset import SPLITS, Tokens, check_range
from sympow.data.tokenizer import Tokenizer, load_tokenizer
from sympow.errors import ArgumentError, UserError
from sympow.extras import require

ENCODER = "tiktoken-gpt2"
ARRAY_ENDING = ".zarr"
METADATA_FILES = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
# All that zarr raises on malformed metadata.
METADATA_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
LARGEST_CHUNK = 2**31 - 1
MOST_DOCUMENTS = 10**9
# The group_tokens of a loader by default: two rows of the published chunks.
CACHE_BYTES = 2**29


class LongCrawl64:
    """One array of LongCrawl64, read lazily.

    Args:
        source: the folder or fsspec address with `train.zarr` and `heldout.zarr`, or one such array. An array with
            another name counts as training documents.
        split: "train" or "heldout"; of a single array, the one that it holds.
        documents: how many to use, as of an incomplete mirror; by default all.
        storage_options: for fsspec, such as {"token": "anon"}.
        cache_bytes: decoded chunks to keep in memory; a shuffled epoch needs two bytes for each of the loader's
            `group_tokens`, or it decodes chunks repeatedly.
    """

    vocab_size = 50_257
    boundary = 50_256

    def __init__(
        self,
        source: Path | str,
        split: str = "train",
        *,
        documents: int | None = None,
        storage_options: dict[str, Any] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        check_choice("split", split, SPLITS)
        address = str(source).rstrip("/")
        if address.endswith(ARRAY_ENDING):
            if (held := split_of_array(address)) != split:
                # Documents that were trained on would count as held out.
                raise ArgumentError(
                    "source",
                    f"must have the split {split!r}, and {address} has only {held!r}; name the folder or address with "
                    f"both train{ARRAY_ENDING} and heldout{ARRAY_ENDING}",
                )
            self.name = address
        else:
            self.name = f"{address}/{split}{ARRAY_ENDING}"
        self._array = _open_array(self.name, storage_options)
        rows, row_length = self._array.shape
        if documents is not None:
            check_at_least("documents", documents, 1)
            if documents > rows:
                raise ArgumentError("documents", f"must be at most the {rows:,} of {self.name}, got {documents:,}")
            rows = documents
        self._chunk_rows, self._chunk_columns = self._array.chunks
        if "://" not in self.name:
            self._refuse_missing_files(rows)
        # Broadcast, since there are millions of documents.
        self.lengths: NDArray[np.int64] = np.broadcast_to(np.int64(row_length), (rows,))
        self.blocks: NDArray[np.int64] = np.append(np.arange(0, rows, self._chunk_rows), rows)
        described = json.dumps([rows, row_length, self._array.chunks, dict(self._array.attrs)], sort_keys=True)
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
        # All chunks of a row must fit, or reading its end would evict its beginning.
        self._largest_cache = max(cache_bytes, self._chunk_rows * row_length * self._array.dtype.itemsize)
        self._cache: OrderedDict[tuple[int, int], Tokens] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def read(self, document: int, start: int, stop: int) -> Tokens:
        check_range(f"document {document} of {self.name}", start, stop, self.lengths[document])
        if start == stop:
            return np.empty(0, np.uint16)
        block, row = divmod(document, self._chunk_rows)
        width = self._chunk_columns
        columns = range(start // width, -(-stop // width))
        slices = []
        for column, chunk in zip(columns, self._chunks(block, columns), strict=True):
            left = column * width
            slices.append(chunk[row, max(start - left, 0) : stop - left])
        return slices[0] if len(slices) == 1 else np.concatenate(slices)

    def document_name(self, document: int) -> str:
        return f"{self.name}, row {document:,}"

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer("gpt2")

    def _chunks(self, block: int, columns: range) -> list[Tokens]:
        """Decoded chunks of a block, from the cache if they are there."""
        with self._lock:
            missing = []
            for column in columns:
                if (block, column) in self._cache:
                    # Most recently used, so that the missing ones do not evict it.
                    self._cache.move_to_end((block, column))
                else:
                    missing.append(column)
            if missing:
                self._decode(block, missing[0], missing[-1] + 1)
            return [self._cache[block, column] for column in columns]

    def _decode(self, block: int, first: int, last: int) -> None:
        """Decodes consecutive chunks of a block into the cache, in one call, so that zarr fetches them concurrently."""
        width = self._chunk_columns
        top, bottom = self.blocks[block : block + 2].tolist()
        try:
            slab = self._array[top:bottom, first * width : last * width]
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{self.name} cannot be decoded in chunks {block}.{first} to {block}.{last - 1}: {error}"
            ) from error
        for column in range(first, last):
            if (block, column) in self._cache:
                continue
            left = (column - first) * width
            # Copied, since a view would keep the whole slab in memory.
            chunk = slab[:, left : left + width].copy()
            self._refuse_filled(chunk, block, column)
            self._cache[block, column] = chunk
            self._cached_bytes += chunk.nbytes
        while self._cached_bytes > self._largest_cache:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.nbytes

    def _refuse_filled(self, chunk: Tokens, block: int, column: int) -> None:
        """zarr silently returns the fill value for a missing chunk; no text repeats one token throughout."""
        if (chunk == chunk.flat[0]).all() and chunk.size > 1:
            raise UserError(
                f"{self.name}: chunk {block}.{column} is missing or empty, all of it reads as {chunk.flat[0]}; "
                "this mirror is incomplete, fetch the chunk again"
            )

    def _refuse_missing_files(self, rows: int) -> None:
        """Checks on a local disk that the files of all chunks exist."""
        root = Path(self.name)
        present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        blocks, columns = -(-rows // self._chunk_rows), -(-self._array.shape[1] // self._chunk_columns)
        wanted = blocks * columns
        if wanted > len(present):
            # Without listing them: damaged metadata may claim any number.
            missing, first = f"at least {wanted - len(present):,}", ""
        else:
            encode = self._array.metadata.encode_chunk_key
            keys = (encode((block, column)) for block in range(blocks) for column in range(columns))
            absent = [key for key in keys if key not in present]
            if not absent:
                return
            missing, first = f"{len(absent):,}", f", first {absent[0]}"
        raise UserError(
            f"{self.name}: {missing} of {wanted:,} chunks are missing{first}; they would read as zeros. Fetch them "
            "again, or open fewer with LongCrawl64(source, documents=N)"
        )


def split_of_array(address: str) -> str:
    """The split that a single array holds, by its name: "heldout" for `heldout.zarr`, "train" for any other."""
    name = address.rstrip("/").rpartition("/")[2].removesuffix(ARRAY_ENDING)
    return name if name in SPLITS else SPLITS[0]


def _open_array(address: str, storage_options: dict[str, Any] | None) -> Any:
    zarr = require("zarr", "data")
    if "://" in address:
        require("fsspec", "data")
    else:
        for name in METADATA_FILES:
            if (path := Path(address) / name).exists() and not path.is_file():
                # Opening a pipe would block until something writes to it.
                raise UserError(f"{path} is not a file")
    try:
        array = zarr.open_array(address, mode="r", storage_options=storage_options)
        encoder = array.attrs.get("encoder")
    except ImportError as error:
        # fsspec's, of the package for the address's protocol, which no extra brings: there are dozens.
        if "://" not in address or not isinstance(error.__cause__, ImportError):
            raise
        package = (error.__cause__.name or "").partition(".")[0]
        raise ArgumentError(
            "source", f"needs the package {package} to open {address}: pip install {package}"
        ) from error
    except METADATA_DAMAGE as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{address} is not a zarr array: {said}") from error
    if array.ndim != 2 or array.dtype != np.uint16:
        raise UserError(f"{address} must be uint16 with a row per document, got {array.dtype} of shape {array.shape}")
    if encoder != ENCODER:
        raise UserError(
            f"{address} must have the attribute encoder={ENCODER!r}, got {encoder!r}: "
            "ids of another tokenizer would be read as GPT-2's"
        )
    _check_layout(address, array)
    return array


def _check_layout(address: str, array: Any) -> None:
    """Refuses metadata that claims more than memory can hold, and pickled chunks."""
    if 0 in array.shape or 0 in array.chunks:
        raise UserError(f"{address} must hold tokens, got shape {array.shape} in chunks of {array.chunks}")
    check_at_most(f"documents of {address}", array.shape[0], MOST_DOCUMENTS, "since each has an entry in memory")
    check_at_most(f"tokens of a document of {address}", array.shape[1], 2**31 - 1, "the most that 32 bits can count")
    chunk = math.prod(array.chunks) * array.dtype.itemsize
    check_at_most(f"bytes of a chunk of {address}", chunk, LARGEST_CHUNK, "the most that zarr's compressors hold")
    metadata = array.metadata
    codecs = [*(getattr(metadata, "filters", None) or ()), getattr(metadata, "compressor", None)]
    if any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs):
        raise UserError(f"{address} has pickled chunks, which could run any program when they are read")
