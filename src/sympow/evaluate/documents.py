"""Held-out documents to evaluate on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sympow.checks import check_at_least
from sympow.data.dataset import TokenDataset


def stretches(dataset: TokenDataset, length: int, count: int, batch: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of stretches of documents, (batch, length) int64 each.

    First the beginning of every document that is long enough, then what comes next in those that are long enough for
    that, and so on: as many documents as there are, before any of them twice. A target is the token after its input;
    before a document's first token stands the boundary.

    Args:
        length: tokens of a stretch.
        count: stretches at most; there may be fewer.
        batch: stretches at a time; the last ones may be fewer.

    Raises:
        ValueError: no document is that long.
    """
    for name, value in (("length", length), ("count", count), ("batch", batch)):
        check_at_least(name, value, 1)
    lengths = np.asarray(dataset.lengths)
    if lengths.max() < length:
        raise ValueError(
            f"{dataset.name} has no document of length={length:,} tokens; the longest has {lengths.max():,}"
        )
    return _batches(dataset, length, _places(lengths, length, count), batch)


def _places(lengths: NDArray[np.int64], length: int, count: int) -> list[tuple[int, int]]:
    """Documents and where in them to start."""
    found: list[tuple[int, int]] = []
    start = 0
    while len(found) < count and (there := np.flatnonzero(lengths >= start + length)).size:
        found += [(int(document), start) for document in there]
        start += length
    return found[:count]


def _batches(
    dataset: TokenDataset, length: int, places: list[tuple[int, int]], batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(places), batch):
        rows = np.empty((len(places[first : first + batch]), length + 1), np.int64)
        for row, (document, start) in zip(rows, places[first : first + batch], strict=True):
            row[1:] = dataset.read(document, start, start + length)
            row[0] = dataset.read(document, start - 1, start)[0] if start else dataset.boundary
        tokens = torch.from_numpy(rows)
        yield tokens[:, :-1], tokens[:, 1:]
