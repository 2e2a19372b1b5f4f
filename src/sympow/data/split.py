"""Which documents are held out."""

from __future__ import annotations

import hashlib

# In place of a split's name: by each document's content.
BY_HASH = "hash"


def split_by_hash(content: bytes, heldout: float) -> str:
    """Says "heldout" for that share of all contents and "train" for the others; equal contents go together."""
    hashed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return "heldout" if hashed < heldout * 2**64 else "train"
