"""Accuracy of a model on the tasks of `sympow.data.state_tracking`, by position, at any length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sympow.data.state_tracking import MASKED, Task
from sympow.model.gpt import GPT

# Tokens read at once.
BATCH_TOKENS = 65_536


@dataclass(frozen=True)
class Score:
    """Predictions of a model on rows of one length.

    Attributes:
        right: right predictions at each position, (length,) int64.
        counted: labels at each position, (length,) int64.
        loss: mean over all labels, in nats.
    """

    right: Tensor
    counted: Tensor
    loss: float

    @property
    def accuracy(self) -> float:
        """Over the second half of the rows, which shorter rows do not have."""
        half = len(self.right) // 2
        return (self.right[half:].sum() / self.counted[half:].sum()).item()

    def by_position(self, bins: int) -> tuple[list[float], list[float]]:
        """Positions at the middle of each of `bins` ranges that have labels, and the accuracies there."""
        positions, accuracies = [], []
        for right, counted, places in zip(
            self.right.tensor_split(bins),
            self.counted.tensor_split(bins),
            torch.arange(len(self.right)).tensor_split(bins),
            strict=True,
        ):
            if counted.sum():
                positions.append(places.double().mean().item())
                accuracies.append((right.sum() / counted.sum()).item())
        return positions, accuracies


def draw_rows(task: Task, seed: list[int], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels as tensors, (rows, length) each."""
    inputs, labels = task.batch(seed, rows, length)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


@torch.no_grad()
def score(model: GPT, inputs: Tensor, labels: Tensor) -> Score:
    """Scores a model on rows, (rows, length) each, from `draw_rows`."""
    device = model.embedding.weight.device
    length = inputs.shape[1]
    right = torch.zeros(length, dtype=torch.int64)
    losses = 0.0
    size = max(1, BATCH_TOKENS // length)
    for tokens, wanted in zip(inputs.split(size), labels.split(size), strict=True):
        logits, _ = model(tokens.to(device), return_state=False)
        wanted = wanted.to(device)
        losses += cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=MASKED, reduction="sum").item()
        right += (logits.argmax(-1) == wanted).sum(0).cpu()
    counted = (labels != MASKED).sum(0)
    return Score(right, counted, losses / int(counted.sum()))
