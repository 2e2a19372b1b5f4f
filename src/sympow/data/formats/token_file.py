"""What the readers of token files share: an array in a file, and where the documents in it end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_regular_file
from sympow.data.dataset import Tokens
from sympow.errors import UserError


@dataclass(frozen=True)
class TokenFile:
    """The ids in a file, one document after the other.

    Attributes:
        path: of the file.
        format: of the file, for display.
        tokens: (tokens,), memory-mapped.
        ends: where each document ends, (documents,), strictly increasing up to the number of tokens.
    """

    path: Path
    format: str
    tokens: Tokens
    ends: NDArray[np.int64]

    @classmethod
    def cut(
        cls, path: Path, format_name: str, tokens: Tokens, ends: NDArray[np.integer[Any]], index: Path
    ) -> TokenFile:
        """Of a file and what its index says, which is checked; documents without tokens are left out.

        Args:
            path: of the tokens.
            format_name: for display.
            tokens: (tokens,).
            ends: of all documents, (documents,).
            index: the file that has the ends, for messages.
        """
        # Compared, not subtracted: differences of unsigned integers wrap around.
        increasing = bool((ends[1:] >= ends[:-1]).all())
        last = ends[-1] if len(ends) else 0
        if not increasing or last != len(tokens):
            said = f"its last document ends at token {last:,}" if increasing else "its ends do not increase"
            raise UserError(
                f"{index} does not fit {path.name}, which has {len(tokens):,} tokens: {said}; one of them is damaged "
                "or incomplete"
            )
        checked: NDArray[np.int64] = ends.astype(np.int64)
        return cls(path, format_name, tokens, checked[np.diff(checked, prepend=0) > 0])


def map_array(path: Path, dtype: str, offset: int = 0) -> NDArray[Any]:
    """The numbers in a file from a byte on, (numbers,), memory-mapped."""
    size, item = file_size(path), np.dtype(dtype).itemsize
    if size < offset or (size - offset) % item:
        raise UserError(f"{path} is damaged or incomplete: {size - offset:,} bytes are no whole number of {dtype}")
    if size == offset:
        return np.empty(0, dtype)
    # As a plain array: slicing np.memmap costs several times as much.
    return np.asarray(np.memmap(path, dtype, "r", offset))


def file_size(path: Path) -> int:
    """Bytes of a file, which must be one: opening a pipe would wait for a writer."""
    check_regular_file(path)
    if not path.exists():
        raise UserError(f"{path} is missing")
    return path.stat().st_size
