"""Tensor files with a checksum: the safetensors layout, with damage detected when a file is loaded.

The layout is that of safetensors: eight bytes with the length of a JSON header, the header, the tensors. The header's
metadata has a checksum: the BLAKE2b hash of the whole file, computed with zeros in place of the checksum's digits. Any
changed bit is therefore detected. Files are not memory-mapped, because the system kills a process whose mapped file is
truncated.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sympow.checks import check_regular_file
from sympow.files import replacing

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
CHECKSUM = "checksum"
NO_CHECKSUM = "0" * 64
DIGITS = re.compile("[0-9a-f]{64}")
# Size of the field with the header's length. The header is padded, so that tensors begin at a multiple of it.
WORD = 8
# A header has a hundred bytes per tensor.
LARGEST_HEADER = 2**24
LARGEST_AXIS = 2**48
MOST_AXES = 16


def save(path: str | os.PathLike[str], form: str, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Writes a file that `load` reads. An existing file is replaced once the new one is complete.

    Args:
        form: the format's name and version, such as "sympow state 2".
        tensors: by name.
        words: strings by name, stored as metadata.
    """
    # The widest dtypes first, so that each tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    contents = {name: tensors[name].detach().cpu().contiguous() for name in order}
    header: dict[str, Any] = {METADATA: {**words, "format": form, CHECKSUM: NO_CHECKSUM}}
    end = 0
    for name, tensor in contents.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % WORD)
    length = len(text).to_bytes(WORD, "little")
    digest = _digest(length, text)
    for tensor in contents.values():
        digest.update(_bytes_of(tensor))
    # Words may contain the same text, but the checksum's entry comes after them, so it is the last match.
    before, found, after = text.rpartition(_checksum_entry(NO_CHECKSUM))
    assert found
    with replacing(path) as file:
        file.write(length + before + _checksum_entry(digest.hexdigest()) + after)
        for tensor in contents.values():
            file.write(_bytes_of(tensor))


def load(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a file that `save` wrote: its tensors, on the CPU, and its words.

    Args:
        form: the format that the file must have.

    Raises:
        ValueError: the file has another format, is truncated, or differs in any bit from what was written.
    """
    check_regular_file(Path(path))
    with open(path, "rb") as file:
        header = _read_header(file, path)
        words = header.words
        if words.get("format") != form:
            raise ValueError(f"{path} must have the format {form!r}, got {words.get('format')!r}")
        if CHECKSUM not in words:
            raise ValueError(f"{path} lacks its checksum")
        checksum = words.pop(CHECKSUM)
        digest = _digest(header.length, _zeroed(header.text, checksum))
        tensors = {}
        for name, entry in header.tensors.items():
            content = bytearray(entry.nbytes)
            if file.readinto(content) != entry.nbytes:
                raise ValueError(f"{path} is cut off in {name}")
            digest.update(content)
            flat = torch.frombuffer(content, dtype=entry.dtype) if content else torch.empty(0, dtype=entry.dtype)
            tensors[name] = flat.reshape(entry.shape)
    if checksum != digest.hexdigest():
        raise ValueError(f"{path} is damaged: its content does not match its checksum")
    return tensors, words


def load_words(path: str | os.PathLike[str], form: str) -> dict[str, str]:
    """Reads the words of a file that `save` wrote, without its tensors.

    Raises:
        ValueError: the file has another format, or not the size that its header says. Other damage is not detected.
    """
    check_regular_file(Path(path))
    with open(path, "rb") as file:
        words = _read_header(file, path).words
    if words.get("format") != form:
        raise ValueError(f"{path} must have the format {form!r}, got {words.get('format')!r}")
    return words


@dataclass(frozen=True)
class _Entry:
    """A tensor's dtype and shape, and the range of its bytes relative to the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class _Header:
    """A header, checked against the size of its file.

    Attributes:
        length: the bytes before the header.
        text: the bytes of the header.
        words: its metadata.
        tensors: in the order of their offsets.
    """

    length: bytes
    text: bytes
    words: dict[str, str]
    tensors: dict[str, _Entry]


def _read_header(file: BinaryIO, path: str | os.PathLike[str]) -> _Header:
    size = os.fstat(file.fileno()).st_size
    length = file.read(WORD)
    count = int.from_bytes(length, "little")
    if len(length) < WORD or count > min(size - WORD, LARGEST_HEADER):
        raise ValueError(f"{path} is not a file of tensors, or is cut off")
    text = file.read(count)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a damaged header: it must map names to tensors")
    words = content.pop(METADATA, {})
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        raise ValueError(f"{path} has a damaged header: {METADATA} must map names to strings")
    entries = {name: _entry(name, described, path) for name, described in content.items()}
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for name, entry in tensors.items():
        if entry.begin != end:
            raise ValueError(f"{path} has a damaged header: {name} must begin at byte {end:,}, not {entry.begin:,}")
        end = entry.end
    if WORD + count + end != size:
        raise ValueError(f"{path} must have {WORD + count + end:,} bytes by its header, got {size:,}: is it cut off?")
    return _Header(length, text, words, tensors)


def _entry(name: str, described: Any, path: str | os.PathLike[str]) -> _Entry:
    """A tensor's entry, checked: its shape must agree with its offsets."""
    if isinstance(described, dict) and described.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        known = isinstance(dtype, str) and dtype in DTYPES
        if known and _is_axes(shape) and _is_axes(offsets) and len(offsets) == 2:
            begin, end = offsets
            if math.prod(shape) * DTYPES[dtype].itemsize == end - begin:
                return _Entry(DTYPES[dtype], tuple(shape), begin, end)
    raise ValueError(f"{path} has a damaged header: the entry of {name} is malformed")


def _is_axes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MOST_AXES
        and all(type(x) is int and 0 <= x <= LARGEST_AXIS for x in value)
    )


def _zeroed(text: bytes, checksum: str) -> bytes:
    """The header as it was hashed, with zeros in place of its checksum; unchanged if it has no checksum."""
    if not DIGITS.fullmatch(checksum):
        return text
    before, found, after = text.rpartition(_checksum_entry(checksum))
    return before + _checksum_entry(NO_CHECKSUM) + after if found else text


def _checksum_entry(checksum: str) -> bytes:
    return f'"{CHECKSUM}": "{checksum}"'.encode()


def _digest(length: bytes, text: bytes) -> Any:
    return hashlib.blake2b(length + text, digest_size=len(NO_CHECKSUM) // 2)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, without NumPy, which is not a dependency."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
