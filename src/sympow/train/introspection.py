"""What gates and rotations do, and where a number stopped being one: seen by watching modules during a forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sympow.layers.gates import Gate
from sympow.layers.rotations import Rotation
from sympow.model.gpt import GPT


@torch.no_grad()
def gate_and_rotation_metrics(model: GPT, run: Callable[[], Any]) -> dict[str, float]:
    """Per layer: the median half-life of the state in tokens, and the mean and deviation of β.

    A state that forgets nothing has no half-life.

    Args:
        run: calls the model on the data to look at.
    """
    numbers: dict[str, float] = {}

    def look(name: str, module: nn.Module, output: Any) -> None:
        layer = name.split(".")[1]
        if isinstance(module, Gate) and output is not None:
            median = -output.float().flatten().median().item()
            if median:
                numbers[f"half_life/layer_{layer}"] = math.log(2) / median
        if isinstance(module, Rotation) and output[1] is not None:
            numbers[f"beta_mean/layer_{layer}"] = output[1].float().mean().item()
            numbers[f"beta_deviation/layer_{layer}"] = output[1].float().std().item()

    with watching(model, (Gate, Rotation), look):
        run()
    return numbers


@torch.no_grad()
def find_nonfinite(model: GPT, run: Callable[[], Any]) -> list[str]:
    """Names of what is not finite: parameters, their gradients, and the first modules whose output is not.

    Args:
        run: calls the model on the data that made it so.
    """
    gradients = [
        f"gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not _finite(parameter.grad)
    ]
    outputs: list[str] = []

    def look(name: str, module: nn.Module, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if any(isinstance(t, Tensor) and not _finite(t) for t in tensors):
            outputs.append(f"output of {name or 'the model'}")

    with watching(model, (nn.Module,), look):
        run()
    # First what came first: an output makes the loss what it is, and the loss makes the gradients.
    return nonfinite_parameters(model) + outputs[:3] + gradients


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that are not finite; of a shared-out one, this process sees its share."""
    return [f"parameter {name}" for name, parameter in model.named_parameters() if not _finite(parameter)]


def _pass_on(look: Callable[[str, nn.Module, Any], None], name: str, module: nn.Module, _: Any, output: Any) -> None:
    look(name, module, output)


def _finite(x: Tensor) -> bool:
    local = x.to_local() if hasattr(x, "to_local") else x
    return bool(local.isfinite().all())


@contextmanager
def watching(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], look: Callable[[str, nn.Module, Any], None]
) -> Iterator[None]:
    """While it lasts, calls `look` with name, module and output at every call of a module of these kinds."""
    handles = [
        module.register_forward_hook(partial(_pass_on, look, name))
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    try:
        # Compiled code would not call back.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
