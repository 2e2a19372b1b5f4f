"""What each head learned to do with its state: how fast it forgets, and how it turns.

Measured on held-out documents and kept in the run's folder, so that it can be shown again without the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sympow.data.dataset import open_dataset
from sympow.data.loader import Batch, Loader
from sympow.evaluate.capture import LayerCapture, capture
from sympow.files import write_atomically
from sympow.model.gpt import GPT
from sympow.parsing import read_json
from sympow.train.run_folder import EXPORT

FILE = "heads.json"
# Tokens to look at, about.
TOKENS = 4_096
# What is measured, in plain words. Rows are layers; columns are key/value heads, or rotated pairs for rate_change.
QUANTITIES = {
    "half_life": "half-life of the state ({unit}s)",
    "half_life_short": "half-life at the tenth percentile ({unit}s)",
    "beta_mean": "rotation scale β, mean",
    "beta_deviation": "rotation scale β, standard deviation",
    "rate_change": "learned rotation rate θ over its start",
}
Matrix = list[list[float | None]]


@dataclass(frozen=True)
class HeadTable:
    """Numbers per layer and head.

    Attributes:
        quantities: some of QUANTITIES: [layer][head], None where there is no such number (it never forgets, say).
        tokens: how many were looked at.
        data: what they are of.
    """

    quantities: dict[str, Matrix]
    tokens: int
    data: str


def quantity_labels(unit: str) -> dict[str, str]:
    """What is measured, in plain words, for models whose tokens are "token" or "byte"."""
    return {name: label.format(unit=unit) for name, label in QUANTITIES.items()}


def half_life(log_gamma: float) -> float | None:
    """Tokens until half is left, −ln 2 / log γ; None: it forgets nothing."""
    return None if log_gamma == 0 else math.log(2) / -log_gamma


def measure_heads(model: GPT, batches: Iterable[Batch], data: str = "") -> HeadTable:
    """Reads batches of one row each and sums up what every head did.

    The half-life is that of the median log γ over tokens (and, for a gate per pair, pairs).
    """
    device = model.embedding.weight.device
    tokens = 0

    def read() -> None:
        nonlocal tokens
        for batch in batches:
            bounds = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
            model.features(batch.inputs.to(device), return_state=False, cu_seqlens=bounds)
            tokens += batch.inputs.numel()

    layers = capture(model, read)
    rows: dict[str, Matrix] = {name: [_row(name, layer) for layer in layers] for name in QUANTITIES}
    return HeadTable({name: matrix for name, matrix in rows.items() if any(matrix)}, tokens, data)


def held_out_rows(settings: dict[str, Any], tokens: int = TOKENS) -> Iterable[Batch]:
    """Held-out documents as a run reads them, a row at a time, about so many tokens.

    Rows are shorter than the run's where there is less text than that.

    Raises:
        ValueError: the run's data is not here, or holds nothing out.
    """
    dataset = open_dataset(settings["data"], "heldout")
    joined = settings["short"] in ("join", "pack")
    context = min(settings["context"], int(dataset.lengths.sum() if joined else dataset.lengths.max()))
    loader = Loader(dataset, context, 1, short=settings["short"], shuffle=False, epochs=1, prefetch=0)
    return islice(loader, max(1, tokens // context))


def read_heads(folder: Path) -> HeadTable | None:
    """What was kept in a run's folder, unless its model is newer."""
    path, weights = folder / FILE, folder / EXPORT / "model.safetensors"
    if not path.is_file() or (weights.is_file() and weights.stat().st_mtime > path.stat().st_mtime):
        return None
    try:
        content = read_json(path)
        return HeadTable(content["quantities"], content["tokens"], content["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of heads ({error}); remove it to have it measured again") from error


def write_heads(folder: Path, heads: HeadTable) -> None:
    content = {"tokens": heads.tokens, "data": heads.data, "quantities": heads.quantities}
    write_atomically(folder / FILE, (json.dumps(content) + "\n").encode())


def _row(quantity: str, layer: LayerCapture) -> list[float | None]:
    if quantity == "rate_change":
        return [] if layer.rate_change is None else layer.rate_change.tolist()
    if quantity.startswith("half_life"):
        if layer.log_gamma is None:
            return []
        part = 0.5 if quantity == "half_life" else 0.1
        return [half_life(x) for x in _by_head(layer.log_gamma).quantile(part, dim=1).tolist()]
    if layer.beta is None:
        return []
    by_head = _by_head(layer.beta)
    found = by_head.mean(1) if quantity == "beta_mean" else by_head.std(1, correction=0)
    numbers: list[float | None] = found.tolist()
    return numbers


def _by_head(x: Tensor) -> Tensor:
    """(tokens, heads[, pairs]) → (heads, tokens · pairs) float64."""
    return x.to(torch.float64).movedim(1, 0).flatten(1)
