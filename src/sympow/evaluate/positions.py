"""Loss as a function of how much has been read, far beyond the training context if asked for.

A document is read in pieces with the state carried across, so that memory depends on the piece and the state, not on
the document (paper §4.2: evaluation at contexts longer than those trained on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sympow.model.gpt import GPT, ModelState
from sympow.model.losses import token_losses

PIECE = 8_192


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
) -> PositionLosses:
    """Mean loss at every position of documents of one length.

    Args:
        model: on the device to compute on.
        documents: inputs and targets, each (b, length) integers, on any device.
        piece: tokens read at a time.
        dtype: of products, under autocast; None: no autocast.
        report: called with the number of documents read so far.

    Raises:
        ValueError: there are no documents, or they differ in length.
    """
    if piece < 1:
        raise ValueError(f"piece must be at least 1, got {piece}")
    device = model.embedding.weight.device
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
            losses = _read(model, inputs.to(device), targets.to(device), piece, dtype).double().cpu()
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


def _read(model: GPT, inputs: Tensor, targets: Tensor, piece: int, dtype: torch.dtype | None) -> Tensor:
    """Losses (b, t), the state carried from piece to piece."""
    state: ModelState | None = None
    parts = []
    for start in range(0, inputs.shape[1], piece):
        now = slice(start, start + piece)
        more = start + piece < inputs.shape[1]
        with torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype is not None):
            features, state = model.features(inputs[:, now], state, return_state=more)
        parts.append(token_losses(features, model.embedding.weight, targets[:, now], dtype=dtype))
    return torch.cat(parts, dim=1)
