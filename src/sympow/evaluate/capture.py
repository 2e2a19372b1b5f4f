"""What gates and rotations did while a model read: seen by watching these modules, whatever calls them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sympow.layers.gates import Gate
from sympow.layers.rotations import LearnedRotation, Rotation
from sympow.model.gpt import GPT
from sympow.train.monitoring import forward_hooks


@dataclass(frozen=True)
class LayerCapture:
    """What a layer's gate and rotation gave, in float32 on the CPU, over all calls in a row.

    Attributes:
        log_gamma: (tokens, h_kv) or (tokens, h_kv, d/2); None: it has no gate.
        beta: (tokens, h_kv) or (tokens, h_kv, d/2); None: its rotation is the same for every token, or there is none.
        rate_change: learned θ over the rates it started from, (d/2,); None: θ is not learned.
    """

    log_gamma: Tensor | None
    beta: Tensor | None
    rate_change: Tensor | None


@torch.no_grad()
def capture(model: GPT, run: Callable[[], Any]) -> list[LayerCapture]:
    """Watches every layer while `run` calls the model, once or often, with a batch of one."""
    gates: dict[int, list[Tensor]] = {}
    scales: dict[int, list[Tensor]] = {}
    changes: dict[int, Tensor] = {}

    def look(name: str, module: nn.Module, output: Any) -> None:
        layer = int(re.findall(r"\d+", name)[0])
        if isinstance(module, Gate) and output is not None:
            gates.setdefault(layer, []).append(_of_the_batch(output))
        if isinstance(module, Rotation):
            theta, beta = output
            if beta is not None:
                scales.setdefault(layer, []).append(_of_the_batch(beta))
            if isinstance(module, LearnedRotation):
                changes[layer] = (theta / module.initial(theta.device)).float().cpu()

    with forward_hooks(model, (Gate, Rotation), look):
        run()
    return [
        LayerCapture(_joined(gates.get(layer)), _joined(scales.get(layer)), changes.get(layer))
        for layer in range(len(model.blocks))
    ]


def _of_the_batch(output: Tensor) -> Tensor:
    if output.shape[0] != 1:
        raise ValueError(f"a capture is of one sequence at a time, got a batch of {output.shape[0]}")
    return output[0].float().cpu()


def _joined(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else torch.cat(parts)
