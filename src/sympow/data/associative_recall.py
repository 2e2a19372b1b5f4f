"""Multi-query associative recall (MQAR), a synthetic dataset: key-value pairs, then keys again as queries.

The value after a repeated key is known only from the key's pair, so that accuracy measures how many pairs the model's
state holds. It is a dataset like any other, for training and for probing.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least, check_choice
from sympow.data.dataset import SPLITS, Tokens, check_range
from sympow.data.tokenizer import ByteTokenizer, Tokenizer
from sympow.errors import ArgumentError, UserError

# The task's name as a source of data.
RECALL = "mqar"
# Bytes: the lower half are keys, the upper half values.
KEYS = np.arange(128)
VALUES = np.arange(128, 256)
HELDOUT_DOCUMENTS = 512


@dataclass(frozen=True)
class RecallTask:
    """Parameters of the task.

    Attributes:
        pairs: number of distinct keys, each with one value.
        length: tokens of a document: the pairs, then all keys with their values again in random order, repeated until
            the document is full. 0: each pair once more.
        documents: in the training split.
        seed: of the documents.
    """

    pairs: int = 16
    length: int = 0
    documents: int = 65_536
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("pairs", self.pairs, 1)
        check_at_least("documents", self.documents, 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("length", self.length, 0)
        if self.pairs > len(KEYS):
            raise ArgumentError("pairs", f"must be at most {len(KEYS)}, the number of keys; got {self.pairs}")
        if self.length == 0:
            object.__setattr__(self, "length", 4 * self.pairs)
        if self.length % 2 or self.length <= 2 * self.pairs:
            raise ArgumentError("length", f"must be even and above 2 · pairs = {2 * self.pairs}, got {self.length}")

    @classmethod
    def parse(cls, name: str) -> RecallTask:
        """From a dataset's name: "mqar", or with options, "mqar:pairs=32,length=256"."""
        _, _, options = name.partition(":")
        given: dict[str, int] = {}
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            if key not in cls.__dataclass_fields__ or not value.isdecimal():
                known = ", ".join(f"{field}=NUMBER" for field in cls.__dataclass_fields__)
                raise UserError(f"{RECALL} takes the options {known}; got {option!r}")
            given[key] = int(value)
        return cls(**given)


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
    """Documents of the task over bytes, generated when they are read; a context of `task.length` has one per row.

    Args:
        task: parameters.
        split: "train", or "heldout" with other documents.
    """

    def __init__(self, task: RecallTask, split: str = "train") -> None:
        check_choice("split", split, SPLITS)
        self.task, self._split = task, split
        self.name = f"associative recall of {task.pairs} pairs in {task.length} tokens ({split})"
        self.vocab_size, self.boundary = ByteTokenizer.vocab_size, ByteTokenizer.boundary
        documents = task.documents if split == "train" else HELDOUT_DOCUMENTS
        self.lengths: NDArray[np.int64] = np.full(documents, task.length, np.int64)
        self.blocks: NDArray[np.int64] = np.array([0, documents])
        self.fingerprint = hashlib.sha256(repr((RECALL, split, asdict(task))).encode()).hexdigest()[:16]

    def read(self, document: int, start: int, stop: int) -> Tokens:
        check_range(self.document_name(document), start, stop, self.lengths[document])
        choose = np.random.default_rng([self.task.seed, SPLITS.index(self._split), document])
        tokens = pairs_and_queries(choose, KEYS, VALUES, self.task.pairs, self.task.length)
        return tokens[start:stop].astype(np.uint16)

    def document_name(self, document: int) -> str:
        return f"{self.name}, document {document}"

    def load_tokenizer(self) -> Tokenizer:
        return ByteTokenizer()
