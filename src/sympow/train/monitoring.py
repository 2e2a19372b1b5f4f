"""What is measured during training: throughput and MFU, gate and rotation statistics, values that are not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sympow.layers.gates import Gate
from sympow.layers.rotations import Rotation
from sympow.model.accounting import mixing_operations, other_operations
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.model.hooks import forward_hooks

# Peak dense bfloat16 FLOP/s, by a substring of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


class Throughput:
    """Tokens per second between two calls of `read`."""

    def __init__(self) -> None:
        self._last, self._tokens = time.monotonic(), 0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> float:
        """Tokens per second since the last call."""
        now = time.monotonic()
        rate = self._tokens / max(now - self._last, 1e-9)
        self._last, self._tokens = now, 0
        return rate


def training_flops(config: GPTConfig, context: int) -> float:
    """FLOPs per token, forward and backward: three times the forward pass, in the cheaper of the two forms.

    As usual for MFU, recomputed activations do not count, nor do features beyond the D symmetric ones.
    """
    mixing = mixing_operations(config, context)
    attention = mixing.attention if config.mixer == "softmax" else min(mixing.attention, mixing.chunked)
    return 3 * (other_operations(config) + attention)


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device, if known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


@torch.no_grad()
def gate_and_rotation_metrics(model: GPT, run: Callable[[], Any]) -> dict[str, float]:
    """Per layer: the median half-life of the state in tokens, and mean and standard deviation of β.

    A layer whose median gate is exactly 1 has no half-life, and one whose β is no scale of RoPE ("signed" and "grid")
    has no statistics of it. A single β, as with a context of 1 and one head, has no deviation.

    Args:
        run: calls the model on the data to measure with.
    """
    numbers: dict[str, float] = {}

    def measure(name: str, module: nn.Module, output: Any) -> None:
        layer = name.split(".")[1]
        if isinstance(module, Gate) and output is not None:
            median = -output.float().flatten().median().item()
            if median:
                numbers[f"half_life/layer_{layer}"] = math.log(2) / median
        if isinstance(module, Rotation) and (beta := module.scales_of_rates(output[1])) is not None:
            numbers[f"beta_mean/layer_{layer}"] = beta.float().mean().item()
            if beta.numel() > 1:
                numbers[f"beta_deviation/layer_{layer}"] = beta.float().std().item()

    with forward_hooks(model, (Gate, Rotation), measure):
        run()
    return numbers


@torch.no_grad()
def find_nonfinite(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Names of what is not finite: parameters, the first modules by their output, and gradients.

    Args:
        run: calls the model on the batch that led to it.
    """
    gradients = [
        f"gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not _finite(parameter.grad)
    ]
    outputs: list[str] = []

    def check(name: str, module: nn.Module, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if any(isinstance(t, Tensor) and not _finite(t) for t in tensors):
            outputs.append(f"output of {name or 'the model'}")

    with forward_hooks(model, (nn.Module,), check):
        run()
    # In order of causation: outputs make the loss non-finite, and the loss the gradients.
    return nonfinite_parameters(model) + outputs[:3] + gradients


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that are not finite; of a sharded parameter, only the local shard is checked."""
    return [f"parameter {name}" for name, parameter in model.named_parameters() if not _finite(parameter)]


def _finite(x: Tensor) -> bool:
    local = x.to_local() if hasattr(x, "to_local") else x
    return bool(local.isfinite().all())
