r"""Indexed datasets of Megatron: ids in `NAME.bin`, and sequences and documents in `NAME.idx`.

The index, little-endian: nine bytes `MMIDIDX\0\0`; version 1 (8 bytes); a code for the type of an id (1 byte); the
number of sequences and the number of ends of documents (8 bytes each); int32, tokens of each sequence; int64, byte of
`NAME.bin` at which each begins; int64, (documents + 1,), the sequences before each document and, last, all of them.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.data.formats.token_file import TokenFile, file_size, map_array
from sympow.errors import UserError

NAME = "Megatron"
ENDING, INDEX_ENDING = ".bin", ".idx"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
# Codes 6 and 7 are floating-point numbers.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_megatron(path: Path) -> TokenFile:
    index = path.with_suffix(INDEX_ENDING)
    if not index.exists():
        raise UserError(f"{path} has no {index.name} beside it, the index that Megatron writes when it is done")
    size = file_size(index)
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{index} is not an index of Megatron: it does not begin with {MAGIC!r} and a header")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{index} has version {version}; this program reads version {VERSION}")
    if code not in DTYPES:
        raise UserError(f"{index} must say that ids are integers, with a code of {sorted(DTYPES)}; got {code}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences:
        raise UserError(f"{index} is of a multimodal dataset, with a mode for each sequence; only text can be read")
    if size != expected:
        raise UserError(
            f"{index} must have {expected:,} bytes for {sequences:,} sequences and {documents:,} ends of documents, "
            f"got {size:,}; it is damaged or incomplete"
        )

    def part(dtype: str, count: int, offset: int) -> NDArray[Any]:
        return np.fromfile(index, dtype, count, offset=offset)

    lengths = part("<i4", sequences, HEADER.size).astype(np.int64)
    begins = part("<i8", sequences, HEADER.size + 4 * sequences)
    firsts = part("<i8", documents, HEADER.size + 12 * sequences)
    tokens = map_array(path, DTYPES[code])
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or (begins != (ends - lengths) * tokens.itemsize).any():
        raise UserError(f"{index} is damaged: its sequences must follow one another in {path.name}")
    if not documents or firsts[0] != 0 or firsts[-1] != sequences or (firsts[1:] < firsts[:-1]).any():
        raise UserError(f"{index} is damaged: its documents must have all {sequences:,} sequences, in their order")
    return TokenFile.cut(path, NAME, tokens, np.append(0, ends)[firsts[1:]], index)
