"""Loss on held-out documents at every position, far beyond the training context if asked for (paper §4.2).

A document is read in segments and the state is carried from one to the next, so memory depends on the segment size and
the state, and not on the document's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sympow.checks import check_at_least
from sympow.data.dataset import TokenDataset
from sympow.errors import ArgumentError
from sympow.model.gpt import GPT, SEGMENT_SIZE, ModelState
from sympow.model.losses import token_losses
from sympow.parallel.shards import Shards, as_group


@dataclass(frozen=True)
class PositionLosses:
    """Loss at each position, averaged over documents.

    Attributes:
        mean: mean over documents, (length,) float64.
        error: standard error of the mean, (length,) float64; NaN for one document.
        documents: number of documents.
    """

    mean: Tensor
    error: Tensor
    documents: int

    def average(self, start: int = 0, stop: int | None = None) -> float:
        """Mean loss over the positions from `start` to `stop`."""
        return float(self.mean[start:stop].mean())

    def by_context(self, contexts: Iterable[int]) -> dict[int, float]:
        """Average loss over the first `context` tokens, for each context (paper Fig. 2)."""
        return {context: self.average(0, context) for context in contexts}


@torch.no_grad()
def loss_by_position(
    model: GPT,
    documents: Iterable[tuple[Tensor, Tensor]],
    *,
    segment_size: int = SEGMENT_SIZE,
    dtype: torch.dtype | None = None,
    report: Callable[[int], None] | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> PositionLosses:
    """Mean loss at every position of documents of one length.

    Args:
        model: the model, on the device to compute on.
        documents: inputs and targets, each (b, length) integers, on any device.
        segment_size: tokens that a process reads at a time.
        dtype: dtype of autocast; None: no autocast.
        report: called with the number of documents read so far.
        group: processes that share each document (context parallelism). All are called with the same documents and
            return the same losses.

    Raises:
        ValueError: there are no documents, or they differ in length.
    """
    check_at_least("segment_size", segment_size, 1)
    device = model.embedding.weight.device
    ranks = None if group is None else as_group(group)
    total = square = None
    count = 0
    was_training = model.training
    model.eval()
    try:
        for inputs, targets in documents:
            if inputs.shape != targets.shape or inputs.ndim != 2:
                raise ArgumentError(
                    "inputs",
                    f"and targets must both be (batch, time), got {tuple(inputs.shape)} and {tuple(targets.shape)}",
                )
            losses = _read(model, inputs.to(device), targets.to(device), segment_size, dtype, ranks).double().cpu()
            if total is None or square is None:
                total, square = torch.zeros(2, losses.shape[1], dtype=torch.float64)
            if losses.shape[1] != len(total):
                raise ArgumentError("documents", f"must have one length, {len(total)}; got {losses.shape[1]}")
            total += losses.sum(0)
            square += losses.square().sum(0)
            count += len(losses)
            if report is not None:
                report(count)
    finally:
        model.train(was_training)
    if total is None or square is None:
        raise ArgumentError("documents", "must not be empty: there is nothing to evaluate on")
    mean = total / count
    variance = (square / count - mean.square()).clamp(min=0) * (count / (count - 1) if count > 1 else torch.nan)
    return PositionLosses(mean, (variance / count).sqrt(), count)


def document_sequences(
    dataset: TokenDataset, length: int, count: int, batch: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of sequences of consecutive tokens of documents, (batch, length) int64 each.

    The first `length` tokens of every document that has as many come first, then the next `length` tokens of those
    that are long enough, and so on. So no document occurs twice before every one has occurred. A target is the token
    after its input; the input before a document's first token is the boundary token.

    Args:
        dataset: the documents.
        length: tokens of a sequence.
        count: number of sequences at most; there may be fewer.
        batch: sequences in a batch; the last batch may have fewer.

    Raises:
        ValueError: no document is that long.
    """
    check_at_least("batch", batch, 1)
    return _batches(dataset, length, _places(dataset, length, count), batch)


def count_sequences(dataset: TokenDataset, length: int, count: int) -> tuple[int, int]:
    """How many sequences `document_sequences` returns, and of how many documents they are."""
    places = _places(dataset, length, count)
    return len(places), len({document for document, _ in places})


def features_by_segment(
    model: GPT, inputs: Tensor, segment_size: int, dtype: torch.dtype | None, group: ProcessGroup | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The model's features of one segment after another: those of a single forward pass, in bounded memory.

    Args:
        model: the model.
        inputs: (b, t) integers on the model's device.
        segment_size: tokens that a process reads at a time.
        dtype: dtype of autocast; None: no autocast.
        group: processes that share the sequence, all with the same inputs.

    Yields:
        positions of a segment, and its features (b, segment_size, width); with a group those of this process.
    """
    length = inputs.shape[1]
    together = segment_size if group is None else segment_size * group.size()
    if group is not None and model.config.mixer == "softmax" and length > together:
        raise ArgumentError(
            "segment_size",
            f"must be at least {-(-length // group.size()):,} for a softmax model in {group.size()} "
            f"processes, which do not pass keys and values from one segment to the next; got {segment_size:,}",
        )
    state: ModelState | None = None
    for start in range(0, length, together):
        now = slice(start, min(start + together, length))
        shards = None if group is None else Shards.even(now.stop - start, group)
        tokens = inputs[:, now]
        if shards is not None:
            tokens = shards.take(tokens)
            now = slice(start + shards.start, start + shards.start + shards.length)
        with torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype is not None):
            features, state = model.features(tokens, state, return_state=start + together < length, shards=shards)
        yield now, features


def _read(
    model: GPT,
    inputs: Tensor,
    targets: Tensor,
    segment_size: int,
    dtype: torch.dtype | None,
    group: ProcessGroup | None,
) -> Tensor:
    """Losses (b, t)."""
    weight = model.output_weight
    losses = torch.zeros(targets.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    for now, features in features_by_segment(model, inputs, segment_size, dtype, group):
        if features.shape[1]:
            losses[:, now] = token_losses(features, weight, targets[:, now], dtype=dtype)
    if group is not None:
        # Each process has the losses of its own positions, and zeros elsewhere.
        dist.all_reduce(losses, group=group)
    return losses


def _places(dataset: TokenDataset, length: int, count: int) -> list[tuple[int, int]]:
    """Document and first token of each sequence."""
    for name, value in (("length", length), ("count", count)):
        check_at_least(name, value, 1)
    lengths = np.asarray(dataset.lengths)
    if lengths.max() < length:
        raise ArgumentError(
            "length", f"must be at most {lengths.max():,}, the longest document of {dataset.name}; got {length:,}"
        )
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
