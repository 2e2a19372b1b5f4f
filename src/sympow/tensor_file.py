"""Tensor files with a checksum: safetensors, with damage detected when a file is loaded.

The checksum, in the file's metadata, is the BLAKE2b hash of all that a file says: its words, and the name, dtype, shape
and bytes of each tensor. Files are not memory-mapped, because the system kills a process whose mapped file is
truncated.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from sympow.checks import check_regular_file
from sympow.errors import UserError
from sympow.files import replacing

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FORM = "format"
CHECKSUM = "checksum"
# torch takes seconds for millions of axes, and has none of 2**63.
MOST_AXES = 16
LARGEST_AXIS = 2**48


def save(path: str | os.PathLike[str], form: str, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Writes a file that `load` reads. An existing file is replaced once the new one is complete.

    Args:
        form: the format's name and version, such as "sympow state 2".
        tensors: by name.
        words: strings by name, stored as metadata.
    """
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    words = {**words, FORM: form}
    write(path, contents, {**words, CHECKSUM: _checksum(contents, words)})


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Writes a file of safetensors, which replaces an existing one once it is complete.

    Of the writers of safetensors, serialize holds the tensors in memory twice more, serialize_file puts a file that
    only its owner can read in place of whatever is there, a device or a link, and those of safetensors.torch need
    NumPy.

    Args:
        tensors: by name.
        words: strings by name, stored as metadata.
    """
    # The widest dtypes first, so that each tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(words)}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            contiguous = tensors[name].detach().cpu().contiguous()
            file.write(_bytes_of(contiguous))


def load(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a file that `save` wrote: its tensors, on the CPU, and its words.

    Args:
        form: the format that the file must have.

    Raises:
        ValueError: the file has another format, is truncated, or differs from what was written.
    """
    with _open(path, form) as file:
        words = file.metadata()
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            entry = file.get_slice(name)
            dtype, shape = entry.get_dtype(), entry.get_shape()
            if dtype not in DTYPES.values() or len(shape) > MOST_AXES or max(shape, default=0) > LARGEST_AXIS:
                raise UserError(f"{path} has a damaged header: the entry of {name} is malformed")
        tensors: dict[str, Tensor] = file.get_tensors()
    if CHECKSUM not in words:
        raise UserError(f"{path} lacks its checksum")
    if words.pop(CHECKSUM) != _checksum(tensors, words):
        raise UserError(f"{path} is damaged: its content does not match its checksum")
    return tensors, words


def load_words(path: str | os.PathLike[str], form: str) -> dict[str, str]:
    """Reads the words of a file that `save` wrote, without its tensors.

    Raises:
        ValueError: the file has another format, or not the size that its header says. Other damage is not detected.
    """
    with _open(path, form) as file:
        words: dict[str, str] = file.metadata()
    return words


@contextmanager
def _open(path: str | os.PathLike[str], form: str) -> Iterator[Any]:
    """Opens a file of a format; says of one that safetensors cannot read that it is damaged."""
    check_regular_file(Path(path))
    # safetensors says of every file that cannot be opened that it does not exist.
    with open(path, "rb"):
        pass
    try:
        with safetensors.safe_open(path, "pt", backend="pread") as file:
            found = (file.metadata() or {}).get(FORM)
            if found != form:
                raise UserError(f"{path} must have the format {form!r}, got {found!r}")
            yield file
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a file of tensors, or is damaged: is it cut off? ({error})") from error


def _checksum(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> str:
    described = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    digest = hashlib.blake2b(json.dumps([words, described], sort_keys=True).encode(), digest_size=32)
    for name in sorted(tensors):
        digest.update(_bytes_of(tensors[name]))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, without NumPy, which is not a dependency."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
