"""What the gates and rotations of each head learned: half-life of the state, rotation scale β, learned rates θ.

They are measured on held-out documents and kept in the run's folder (`heads.json`), so that a report can show them
without the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sympow.data.loader import Batch, Loader
from sympow.data.open import open_dataset
from sympow.errors import UserError
from sympow.files import write_atomically
from sympow.layers.gates import Gate
from sympow.layers.rotations import LearnedRotation, Rotation
from sympow.model.gpt import GPT
from sympow.model.hooks import forward_hooks
from sympow.parsing import read_json
from sympow.train.run_folder import EXPORT

FILE = "heads.json"
# Tokens to measure on, about.
TOKENS = 4_096
# What is measured, with its label. Rows are layers; columns are key/value heads, or rotated pairs for rate_change.
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
    """Statistics of every layer and head.

    Attributes:
        quantities: [layer][head] for some of QUANTITIES; None where a head has no such number, such as the half-life
            of a head that never forgets.
        tokens: number of tokens that were read.
        data: the dataset that they are from.
    """

    quantities: dict[str, Matrix]
    tokens: int
    data: str


def quantity_labels(unit: str) -> dict[str, str]:
    """Labels of QUANTITIES; `unit` is what a token is called, "token" or "byte"."""
    return {name: label.format(unit=unit) for name, label in QUANTITIES.items()}


def half_life(log_gamma: float) -> float | None:
    """Tokens until half of a contribution to the state is left, −ln 2 / log γ; None if γ = 1."""
    return None if log_gamma == 0 else math.log(2) / -log_gamma


@dataclass(frozen=True)
class LayerCapture:
    """Outputs of a layer's gate and rotation, in float32 on the CPU, concatenated over all calls.

    Attributes:
        log_gamma: (tokens, h_kv) or (tokens, h_kv, d/2); None: the layer has no gate.
        beta: (tokens, h_kv) or (tokens, h_kv, d/2); None: the layer has no rotation, or one without β, or one whose β
            is no scale of RoPE ("signed" and "grid").
        rate_change: learned θ over its initial value, (d/2,); None: θ is not learned.
    """

    log_gamma: Tensor | None
    beta: Tensor | None
    rate_change: Tensor | None


@torch.no_grad()
def capture(model: GPT, run: Callable[[], Any]) -> list[LayerCapture]:
    """Captures the outputs of all gates and rotations with forward hooks while `run` calls the model.

    `run` may call the model several times, with a batch of one each time.
    """
    gates: dict[int, list[Tensor]] = {}
    scales: dict[int, list[Tensor]] = {}
    changes: dict[int, Tensor] = {}

    def look(name: str, module: nn.Module, output: Any) -> None:
        layer = int(re.findall(r"\d+", name)[0])
        if isinstance(module, Gate) and output is not None:
            gates.setdefault(layer, []).append(_of_the_batch(output))
        if isinstance(module, Rotation):
            theta, beta = output
            if (scale := module.scales_of_rates(beta)) is not None:
                scales.setdefault(layer, []).append(_of_the_batch(scale))
            if isinstance(module, LearnedRotation):
                changes[layer] = (theta / module.initial(theta.device)).float().cpu()

    with forward_hooks(model, (Gate, Rotation), look):
        run()
    return [
        LayerCapture(_joined(gates.get(layer)), _joined(scales.get(layer)), changes.get(layer))
        for layer in range(len(model.blocks))
    ]


def measure_heads(model: GPT, batches: Iterable[Batch], data: str = "") -> HeadTable:
    """Runs the model on batches of one row each and computes the statistics of every head.

    The half-life is that of the median log γ over tokens (and over pairs, for a gate per pair).
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
    """Batches of one row of held-out documents, made as a run makes its batches, about `tokens` tokens in all.

    Rows are shorter than the run's context where there is less text than that.

    Raises:
        ValueError: the run's data does not exist here, or has no held-out documents.
    """
    dataset = open_dataset(settings["data"], "heldout")
    joined = settings["short"] in ("join", "pack")
    context = min(settings["context"], int(dataset.lengths.sum() if joined else dataset.lengths.max()))
    loader = Loader(dataset, context, 1, short=settings["short"], shuffle=False, epochs=1, prefetch=0)
    return islice(loader, max(1, tokens // context))


def read_heads(folder: Path) -> HeadTable | None:
    """The table in a run's folder; None: there is none, or the model is newer."""
    path, weights = folder / FILE, folder / EXPORT / "model.safetensors"
    if not path.is_file() or (weights.is_file() and weights.stat().st_mtime > path.stat().st_mtime):
        return None
    try:
        content = read_json(path)
        return HeadTable(content["quantities"], content["tokens"], content["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a table of head statistics ({error}); remove it, and `sympow report` measures them again"
        ) from error


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


def _of_the_batch(output: Tensor) -> Tensor:
    if output.shape[0] != 1:
        raise UserError(f"a capture is of one sequence at a time, got a batch of {output.shape[0]}")
    return output[0].float().cpu()


def _joined(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else torch.cat(parts)
