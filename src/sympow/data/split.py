"""Which documents are held out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

# In place of a split's name: by each document's content.
BY_HASH = "hash"
# Hashes are below this.
HASHES = 2**64


def hash_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def split_by_hash(content: bytes, heldout: float) -> str:
    """Says "heldout" for that share of all contents and "train" for the others; equal contents go together."""
    return "heldout" if hash_of(content) < heldout * HASHES else "train"


@dataclass(frozen=True)
class Rule:
    """How documents are shared out between training and what is held out.

    Attributes:
        below: documents whose hash is below this are held out.
        tail: share of a document, its end, that is held out of each that is not; 0: documents stay whole.
    """

    below: int
    tail: float = 0.0

    @classmethod
    def for_documents(cls, contents: Iterable[bytes], heldout: float) -> Rule:
        """Holds out a share of documents by their hash, at least one, and leaves at least one for training.

        Of few documents the share may be none, or all: then the one with the lowest hash is held out, or the one with
        the highest is not. Of a single document (or copies of one), the end is held out.

        Args:
            contents: of all documents. They are read only until one for each side is found.
            heldout: the share; above 0.
        """
        below = math.ceil(heldout * HASHES)
        lowest, highest = HASHES, -1
        for content in contents:
            hashed = hash_of(content)
            lowest, highest = min(lowest, hashed), max(highest, hashed)
            if lowest < below <= highest:
                return cls(below)
        if lowest >= highest:
            return cls(0, tail=heldout)
        return cls(lowest + 1 if lowest >= below else highest)

    def parts(self, text: str) -> list[tuple[str, str]]:
        """A document's text as the splits have it: whole in one of them, or its beginning and its end."""
        if self.tail and len(text) > 1:
            cut = min(max(1, round(len(text) * (1 - self.tail))), len(text) - 1)
            return [("train", text[:cut]), ("heldout", text[cut:])]
        return [("heldout" if hash_of(text.encode()) < self.below else "train", text)]
