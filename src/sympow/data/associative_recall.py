"""Multi-query associative recall (MQAR), a synthetic dataset: key-value pairs, then keys again as queries.

The value after a repeated key is known only from the key's pair, so that accuracy measures how many pairs the model's
state holds. It is a dataset like any other, for training and for probing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least, check_at_most, check_choice
from sympow.data.dataset import SPLITS, Tokens, check_range
from sympow.data.tokenizer import ByteTokenizer, Tokenizer
from sympow.errors import ArgumentError, UserError

# The task's name as a source of data.
RECALL = "mqar"
# Bytes: the lower half are keys, the upper half values.
KEYS = np.arange(128)
VALUES = np.arange(128, 256)
HELDOUT_DOCUMENTS = 512
# Of the task, in its name as a source.
OPTIONS = ("pairs", "length", "documents", "seed")


def pairs_and_queries(
    choose: np.random.Generator, keys: NDArray[Any], values: NDArray[Any], pairs: int, length: int
) -> NDArray[np.int64]:
    """One document of the task, (length,): key, value, key, value, … Answers are the values from position 2 · pairs on.

    Args:
        keys: ids to draw keys from, without repetition.
        values: ids to draw values from, with repetition.
    """
    chosen = choose.choice(keys, pairs, replace=False)
    told = choose.choice(values, pairs)
    rounds = -(-(length // 2 - pairs) // pairs)
    order = np.concatenate([np.arange(pairs), *(choose.permutation(pairs) for _ in range(rounds))])[: length // 2]
    return np.stack([chosen[order], told[order]], axis=1).reshape(-1).astype(np.int64)


class AssociativeRecall:
    """Documents of the task over bytes, generated when they are read; a context of `length` has one per row.

    Args:
        split: "train", or "heldout" with other documents.
        pairs: number of distinct keys, each with one value.
        length: tokens of a document: the pairs, then all keys with their values again in random order, repeated until
            the document is full. 0: each pair once more.
        documents: in the training split.
        seed: of the documents.
    """

    def __init__(
        self, split: str = "train", *, pairs: int = 16, length: int = 0, documents: int = 65_536, seed: int = 0
    ) -> None:
        check_choice("split", split, SPLITS)
        for name, value, smallest in (("pairs", pairs, 1), ("documents", documents, 1), ("seed", seed, 0)):
            check_at_least(name, value, smallest)
        check_at_most("pairs", pairs, len(KEYS), "the number of keys")
        length = length or 4 * pairs
        if length % 2 or length <= 2 * pairs:
            raise ArgumentError("length", f"must be even and above 2 · pairs = {2 * pairs}, got {length}")
        self._pairs, self._length, self._seed, self._split = pairs, length, seed, split
        self.name = f"associative recall of {pairs} pairs in {length} tokens ({split})"
        self.vocab_size, self.boundary = ByteTokenizer.vocab_size, ByteTokenizer.boundary
        task = {"pairs": pairs, "length": length, "documents": documents, "seed": seed}
        self.fingerprint = hashlib.sha256(repr((RECALL, split, task)).encode()).hexdigest()[:16]
        documents = documents if split == "train" else HELDOUT_DOCUMENTS
        self.lengths: NDArray[np.int64] = np.full(documents, length, np.int64)
        self.blocks: NDArray[np.int64] = np.array([0, documents])

    @classmethod
    def parse(cls, name: str, split: str) -> AssociativeRecall:
        """Of a dataset's name: "mqar", or with options, "mqar:pairs=32,length=256"."""
        given: dict[str, int] = {}
        for option in filter(None, name.partition(":")[2].split(",")):
            key, _, value = option.partition("=")
            if key not in OPTIONS or not value.isdecimal():
                known = ", ".join(f"{option}=NUMBER" for option in OPTIONS)
                raise UserError(f"{RECALL} takes the options {known}; got {option!r}")
            given[key] = int(value)
        return cls(split, **given)

    def read(self, document: int, start: int, stop: int) -> Tokens:
        check_range(self.document_name(document), start, stop, self.lengths[document])
        choose = np.random.default_rng([self._seed, SPLITS.index(self._split), document])
        tokens = pairs_and_queries(choose, KEYS, VALUES, self._pairs, self._length)
        return tokens[start:stop].astype(np.uint16)

    def document_name(self, document: int) -> str:
        return f"{self.name}, document {document}"

    def load_tokenizer(self) -> Tokenizer:
        return ByteTokenizer()
