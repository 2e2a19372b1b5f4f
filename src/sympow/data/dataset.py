"""The interface `TokenDataset`, and what all datasets share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sympow.data.tokenizer import Tokenizer
from sympow.errors import ArgumentError

SPLITS = ("train", "heldout")

Tokens = NDArray[np.integer[Any]]


class TokenDataset(Protocol):
    """Documents as token ids, read by ranges of tokens.

    A loader needs only these members, so that any class that has them can be trained on.

    Attributes:
        name: where the data come from, for messages.
        lengths: tokens of every document, (documents,).
        blocks: offsets into the documents, (blocks + 1,), strictly increasing from 0 to their number. Documents of one
            block are quick to read together, so a shuffled epoch reads a few blocks at a time.
        vocab_size: every id is below this.
        boundary: the id before a document's first token.
        fingerprint: changes when the data change; a loader's position is valid for one fingerprint only.
    """

    @property
    def name(self) -> str: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    @property
    def blocks(self) -> NDArray[np.int64]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def boundary(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Tokens start to stop of a document, (stop - start,), read-only."""
        ...

    def document_name(self, document: int) -> str:
        """The file, line or row that a document comes from."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        ...


class StoredDocuments:
    """Documents in arrays of tokens, one after the other in each array.

    Args:
        name: where they come from, for messages.
        arrays: (tokens,) each, of whole documents.
        lengths: of the documents in each array, (documents,) each.
    """

    def __init__(self, name: str, arrays: Sequence[Tokens], lengths: Sequence[NDArray[np.int64]]) -> None:
        self.name = name
        self.lengths: NDArray[np.int64] = np.concatenate(lengths)
        self._arrays = arrays
        # Where each document begins in its array.
        self._starts = np.concatenate([np.cumsum(some) - some for some in lengths])
        self._first_documents: list[int] = np.cumsum([0, *map(len, lengths)])[:-1].tolist()

    def read(self, document: int, start: int, stop: int) -> Tokens:
        # Not by its name, which takes longer to find than its tokens.
        check_range(f"document {document} of {self.name}", start, stop, self.lengths[document])
        begin = self._starts[document]
        return self._arrays[self._array_of(document)][begin + start : begin + stop]

    def _array_of(self, document: int) -> int:
        return bisect_right(self._first_documents, document) - 1


def check_range(name: str, start: int, stop: int, length: int) -> None:
    """Refuses a range that is not inside a document; slicing would silently return fewer tokens."""
    if not 0 <= start <= stop <= length:
        raise ArgumentError(name, f"has {length:,} tokens; tokens {start:,} to {stop:,} were asked for")
