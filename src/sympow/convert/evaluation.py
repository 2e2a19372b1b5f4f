"""Held-out loss of teacher and student, at the training context and at multiples of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sympow.convert.config import TextConfig
from sympow.convert.distillation import rows_in_memory
from sympow.convert.models import features, output_weight
from sympow.data.dataset import TokenDataset
from sympow.data.loader import Loader
from sympow.errors import UserError
from sympow.evaluate.evaluation_file import averages_over_ranges
from sympow.evaluate.held_out_loss import document_sequences
from sympow.files import write_atomically
from sympow.model.losses import token_losses
from sympow.parsing import read_json

Sequences = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LossAtContext:
    """Held-out loss on sequences of one length.

    Attributes:
        loss: mean over all tokens, in nats.
        of_each: mean of each sequence; every model is evaluated on the same sequences.
        late: mean over the last quarter of the positions.
        by_position: mean over ranges of positions, by the centre of the range.
    """

    loss: float
    of_each: list[float]
    late: float
    by_position: dict[str, float]


@dataclass(frozen=True)
class ModelLosses:
    """Held-out losses of one model.

    Attributes:
        name: "teacher", "start" for the untrained student, or the stage that the student was evaluated after.
        tokens: tokens that it was trained on in this conversion.
        by_context: losses by sequence length.
    """

    name: str
    tokens: int
    by_context: dict[int, LossAtContext]

    def save(self, path: Path) -> None:
        write_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> ModelLosses:
        content: Any = read_json(path)
        try:
            by_context = {int(n): LossAtContext(**entry) for n, entry in content["by_context"].items()}
            return cls(content["name"], content["tokens"], by_context)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"{path} is not an evaluation of a conversion: {error}") from error


def held_out_sequences(
    dataset: TokenDataset,
    text: TextConfig,
    batch_tokens: int,
    positions: int | None = None,
) -> tuple[dict[int, Sequences], list[str]]:
    """Inputs and targets to evaluate on: for each length about `text.evaluate_tokens` tokens, at least one sequence.

    Sequences come from documents that are long enough. If there are none, sequences of the training context come from
    shorter documents as in training (`text.short`), and longer contexts are left out.

    Args:
        dataset: held-out documents.
        text: the contexts and the number of tokens.
        batch_tokens: tokens per batch, which has at least one sequence.
        positions: the most tokens of a sequence that the model can take; None: any number.

    Returns:
        batches by sequence length, and a note for each length that was left out.
    """
    found: dict[int, Sequences] = {}
    notes = []
    longest = int(np.asarray(dataset.lengths).max())
    for length in (factor * text.context for factor in text.factors()):
        count, batch = max(1, text.evaluate_tokens // length), max(1, batch_tokens // length)
        if positions is not None and length > positions:
            notes.append(f"not evaluated at {length:,} tokens: the teacher has embeddings of {positions:,} positions")
        elif longest >= length:
            found[length] = list(document_sequences(dataset, length, count, batch))
        elif length == text.context:
            rows = Loader(dataset, length, 1, short=text.short, shuffle=False, epochs=1, prefetch=0)
            found[length] = [(row.inputs, row.targets) for row in islice(rows, count)]
        else:
            notes.append(
                f"not evaluated at {length:,} tokens: the longest held-out document of {dataset.name} has {longest:,}"
            )
    return found, notes


@torch.no_grad()
def measure_losses(
    model: Any,
    sequences: dict[int, Sequences],
    dtype: torch.dtype | None,
) -> dict[int, LossAtContext]:
    """Losses of a causal language model, by sequence length.

    Args:
        dtype: dtype of autocast; None: no autocast.
    """
    weight = output_weight(model)
    results = {}
    # Eager, because compiled layers would be compiled again for each length.
    with torch.compiler.set_stance("force_eager"):
        for length, batches in sequences.items():
            losses = []
            for inputs, targets in batches:
                with torch.autocast(weight.device.type, dtype=dtype, enabled=dtype is not None):
                    hidden = features(model, inputs.to(weight.device))
                found = token_losses(
                    hidden, weight, targets.to(weight.device), tokens=rows_in_memory(weight), dtype=dtype
                )
                losses.append(found.double().cpu())
            results[length] = _summary(torch.cat(losses))
    return results


def difference(one: LossAtContext, other: LossAtContext) -> tuple[float, float]:
    """Mean difference of losses on the same sequences and its standard error, NaN for one sequence."""
    differences = torch.tensor(one.of_each, dtype=torch.float64) - torch.tensor(other.of_each, dtype=torch.float64)
    count = len(differences)
    error = float(differences.std() / count**0.5) if count > 1 else float("nan")
    return float(differences.mean()), error


def _summary(losses: Tensor) -> LossAtContext:
    """The summary of losses (sequences, length)."""
    means = losses.mean(0).tolist()
    late = len(means) - max(1, len(means) // 4)
    ranges = averages_over_ranges(means)
    return LossAtContext(
        loss=float(losses.mean()),
        of_each=losses.mean(1).tolist(),
        late=float(losses[:, late:].mean()),
        by_position={f"{at:.1f}": loss for at, loss in zip(*ranges, strict=True)},
    )
