"""Packs documents into rows of a batch, as slices of documents, and orders the rows of an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sympow.errors import ArgumentError


def permutation(count: int, *seed: int) -> NDArray[np.int64]:
    """A permutation of the numbers below `count`, determined by the seed, (count,).

    Sorts raw random bits, whose sequence NumPy guarantees across versions, unlike that of its own permutations: a run
    must resume in the same order after an upgrade.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(bits, kind="stable")


def group_by_size(sizes: Iterable[int], largest: int) -> list[int]:
    """Groups consecutive sizes greedily up to a total of `largest`; a larger one is a group by itself.

    Returns:
        The number of the first of each group.
    """
    firsts: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        if not firsts or total + size > largest:
            firsts.append(number)
            total = 0
        total += size
    return firsts


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RowSlices:
    """Rows, each a sequence of slices of documents.

    Attributes:
        documents: document of each slice, (slices,).
        starts: first token of each slice in its document, (slices,).
        stops: one after its last, (slices,).
        offsets: first slice of each row and, last, their number, (rows + 1,).
    """

    documents: Ints
    starts: Ints
    stops: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: Ints) -> RowSlices:
        """Some rows, in the order given."""
        counts = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.append(0, np.cumsum(counts))
        slices = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], counts)
        return RowSlices(self.documents[slices], self.starts[slices], self.stops[slices], offsets)

    @classmethod
    def join(cls, all_rows: list[RowSlices]) -> RowSlices:
        """Concatenates."""
        counts = np.concatenate([np.diff(rows.offsets) for rows in all_rows])
        return cls(
            np.concatenate([rows.documents for rows in all_rows]),
            np.concatenate([rows.starts for rows in all_rows]),
            np.concatenate([rows.stops for rows in all_rows]),
            np.append(0, np.cumsum(counts)),
        )


def full_rows(lengths: Ints, first: int, context: int) -> RowSlices:
    """All full rows of consecutive documents, one slice each.

    Args:
        lengths: tokens of each document, (documents,).
        first: number of the first document.
        context: tokens of a row.
    """
    counts = lengths // context
    documents = np.repeat(np.arange(len(lengths)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(documents)) - before) * context
    return RowSlices(documents + first, starts, starts + context, np.arange(len(documents) + 1))


def joined_rows(lengths: Ints, first: int, context: int, order: Ints) -> RowSlices:
    """The remainders of consecutive documents after their full rows, concatenated and cut into rows.

    The last tokens, too few for a row, are dropped.

    Args:
        lengths: tokens of each document, (documents,).
        first: number of the first document.
        context: tokens of a row.
        order: of the documents, (documents,).
    """
    remainders = (lengths % context)[order]
    ends = np.cumsum(remainders)
    kept = (ends[-1] // context) * context
    # Cuts fall where a document ends and where a row does.
    cuts = np.unique(np.concatenate([ends[ends < kept], np.arange(0, kept + 1, context)]))
    begins, sizes = cuts[:-1], np.diff(cuts)
    slices = np.searchsorted(ends, begins, side="right")
    documents = order[slices]
    starts = lengths[documents] - ends[slices] + begins
    offsets = np.searchsorted(begins, np.arange(0, kept + 1, context))
    return RowSlices(documents + first, starts, starts + sizes, offsets)


class RowOrder:
    """Rows of a dataset in the order of training.

    Args:
        lengths: tokens of each document, (documents,).
        blocks: offsets of the blocks into the documents, (blocks + 1,), strictly increasing from 0 to their number.
        context: tokens of a row.
        join: whether remainders are joined into rows.
        seed: of the order; None: no shuffling.
        group_tokens: rows are shuffled among as many blocks as have this many tokens together, at least one.
    """

    def __init__(
        self, lengths: Ints, blocks: Ints, context: int, *, join: bool, seed: int | None, group_tokens: int
    ) -> None:
        _check_blocks(blocks, len(lengths))
        self._lengths, self._blocks, self._context = lengths, blocks, context
        self._join, self._seed, self._group_tokens = join, seed, group_tokens
        self._block_tokens = np.add.reduceat(lengths, blocks[:-1])
        # Independent of the order, so that every epoch has the same number of rows.
        self._block_rows = np.add.reduceat(lengths // context, blocks[:-1])
        if join:
            self._block_rows += np.add.reduceat(lengths % context, blocks[:-1]) // context
        self.count = int(self._block_rows.sum())
        # A batch may extend over two groups, and the next batch starts in the second.
        self._group = lru_cache(maxsize=2)(self._make_group)
        self._epoch = lru_cache(maxsize=1)(self._make_epoch)

    def rows(self, epoch: int, start: int, stop: int) -> RowSlices:
        """Rows start to stop of an epoch."""
        groups, offsets = self._epoch(epoch)
        found = []
        group = int(np.searchsorted(offsets, start, side="right")) - 1
        while start < stop:
            first, last = offsets[group : group + 2].tolist()
            rows, shuffled = self._group(epoch, groups[group])
            found.append(rows.take(shuffled[start - first : min(stop, last) - first]))
            start = min(stop, last)
            group += 1
        return RowSlices.join(found)

    def _make_epoch(self, epoch: int) -> tuple[list[tuple[int, ...]], Ints]:
        """The blocks of each group, and the offsets of the groups into the rows, (groups + 1,)."""
        order = self._permutation(len(self._block_tokens), epoch, 0)
        firsts = group_by_size(self._block_tokens[order].tolist(), self._group_tokens)
        groups = [tuple(group.tolist()) for group in np.split(order, firsts[1:])]
        counts = np.add.reduceat(self._block_rows[order], firsts).tolist()
        return groups, np.append(0, np.cumsum(counts))

    def _make_group(self, epoch: int, blocks: tuple[int, ...]) -> tuple[RowSlices, Ints]:
        by_block = []
        for block in blocks:
            first, last = self._blocks[block : block + 2].tolist()
            lengths = self._lengths[first:last]
            by_block.append(full_rows(lengths, first, self._context))
            if self._join:
                order = self._permutation(len(lengths), epoch, 1, block)
                by_block.append(joined_rows(lengths, first, self._context, order))
        rows = RowSlices.join(by_block)
        return rows, self._permutation(len(rows), epoch, 2, blocks[0])

    def _permutation(self, count: int, *numbers: int) -> Ints:
        return np.arange(count) if self._seed is None else permutation(count, self._seed, *numbers)


def _check_blocks(blocks: Ints, documents: int) -> None:
    """Refuses offsets with which documents would be counted twice or not at all, as in a dataset of the user's own."""
    # Compared, not subtracted: differences of unsigned integers wrap around.
    increase = blocks.ndim == 1 and bool((blocks[1:] > blocks[:-1]).all())
    if not increase or not len(blocks) or blocks[0] != 0 or blocks[-1] != documents:
        shown = np.array2string(blocks, separator=", ", threshold=8, max_line_width=1_000)
        raise ArgumentError(
            "blocks", f"must strictly increase from 0 to the number of documents, which is {documents:,}; got {shown}"
        )
