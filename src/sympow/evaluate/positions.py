"""Loss as a function of how much has been read, far beyond the training context if asked for.

A document is read in pieces with the state carried across, so that memory depends on the piece and the state, not on
the document (paper §4.2: evaluation at contexts longer than those trained on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sympow.checks import check_at_least
from sympow.evaluate.scoring import read_in_pieces
from sympow.model.gpt import GPT, PIECE
from sympow.model.losses import token_losses
from sympow.parallel.shards import as_group


@dataclass(frozen=True)
class PositionLosses:
    """Losses of documents at each position.

    Attributes:
        mean: over documents, (length,) float64.
        error: standard error of it, (length,) float64; NaN for one document.
        documents: how many.
    """

    mean: Tensor
    error: Tensor
    documents: int

    def average(self, start: int = 0, stop: int | None = None) -> float:
        """Mean over a range of positions."""
        return float(self.mean[start:stop].mean())

    def by_context(self, contexts: Iterable[int]) -> dict[int, float]:
        """Average loss of the tokens within each context: what a model of that context sees (paper Fig. 2)."""
        return {context: self.average(0, context) for context in contexts}


@torch.no_grad()
def loss_by_position(
    model: GPT,
    documents: Iterable[tuple[Tensor, Tensor]],
    *,
    piece: int = PIECE,
    dtype: torch.dtype | None = None,
    report: Callable[[int], None] | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> PositionLosses:
    """Mean loss at every position of documents of one length.

    Args:
        model: on the device to compute on.
        documents: inputs and targets, each (b, length) integers, on any device.
        piece: tokens read at a time.
        dtype: of products, under autocast; None: no autocast.
        report: called with the number of documents read so far.
        group: processes that read each document together, all called with the same documents: each reads `piece` tokens
            at a time, and all get the same losses. So a document may be as long as one process would take too long for.

    Raises:
        ValueError: there are no documents, or they differ in length.
    """
    check_at_least("piece", piece, 1)
    device = model.embedding.weight.device
    ranks = None if group is None else as_group(group)
    total = square = None
    count = 0
    was_training = model.training
    model.eval()
    try:
        for inputs, targets in documents:
            if inputs.shape != targets.shape or inputs.ndim != 2:
                raise ValueError(
                    f"inputs and targets must be (batch, time) alike, got {tuple(inputs.shape)} and "
                    f"{tuple(targets.shape)}"
                )
            losses = _read(model, inputs.to(device), targets.to(device), piece, dtype, ranks).double().cpu()
            if total is None or square is None:
                total, square = torch.zeros(2, losses.shape[1], dtype=torch.float64)
            if losses.shape[1] != len(total):
                raise ValueError(f"documents must have one length, {len(total)}; got {losses.shape[1]}")
            total += losses.sum(0)
            square += losses.square().sum(0)
            count += len(losses)
            if report is not None:
                report(count)
    finally:
        model.train(was_training)
    if total is None or square is None:
        raise ValueError("documents must not be empty: there is nothing to evaluate on")
    mean = total / count
    variance = (square / count - mean.square()).clamp(min=0) * (count / (count - 1) if count > 1 else torch.nan)
    return PositionLosses(mean, (variance / count).sqrt(), count)


def _read(
    model: GPT, inputs: Tensor, targets: Tensor, piece: int, dtype: torch.dtype | None, group: ProcessGroup | None
) -> Tensor:
    """Losses (b, t), the state carried from piece to piece."""
    weight = model.embedding.weight
    losses = torch.zeros(targets.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    for now, features in read_in_pieces(model, inputs, piece, dtype, group):
        if features.shape[1]:
            losses[:, now] = token_losses(features, weight, targets[:, now], dtype=dtype)
    if group is not None:
        # Each process has some of the positions, and zero at the others.
        dist.all_reduce(losses, group=group)
    return losses
