"""How data-dependent rotations start and learn, where that differs from the rest of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sympow.data.loader import Batch
from sympow.layers.rotations import DataDependentRotation
from sympow.train.config import OptimizerConfig


def set_up_rotations(model: nn.Module, config: OptimizerConfig) -> None:
    """Starts W_β where the config says, and sets the factor on the gradient through β.

    The numbers are drawn after all others of the model, so that a seed gives the same model otherwise; on the CPU, so
    that they are the same on every device. A model that has no such rotation is left as it is.
    """
    for module in model.modules():
        if not isinstance(module, DataDependentRotation):
            continue
        module.gradient_scale = config.rotation_gradient
        if config.rotation_init:
            weight = module.beta_proj.weight
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, dtype=weight.dtype) * config.rotation_init)


RELATIVE_RATE = "relative_rate"


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over three groups: matrices, which decay; the rotation's projection W_β; and all else.

    The embedding counts as a matrix, learned rates θ of a rotation do not. Fused on a GPU.
    """
    rotation, matrices, others = [], [], []
    for name, parameter in model.named_parameters():
        if ".beta_proj." in name:
            rotation.append(parameter)
        elif parameter.ndim >= 2 and "gate." not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay, RELATIVE_RATE: 1.0},
        {"params": rotation, "weight_decay": 0.0, RELATIVE_RATE: config.rotation_rate},
        {"params": others, "weight_decay": 0.0, RELATIVE_RATE: 1.0},
    ]
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=on_gpu or None,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate, each group's in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RELATIVE_RATE]


def take_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    norm: Tensor,
    clip_norm: float,
    *,
    unless: Tensor | None = None,
) -> None:
    """Clips the gradients and moves the parameters.

    Args:
        norm: of all gradients together.
        clip_norm: the longest gradient; 0: no clipping.
        unless: a bool on the device: where it holds, parameters, gradients and Adam's averages stay as they are. Only
            for the fused optimiser.
    """
    if unless is not None:
        norm = norm.masked_fill(unless, 0.0)  # shorter than any limit
        # The optimiser's own way not to move, made for scaled gradients.
        optimizer.found_inf = unless.to(torch.float32)  # type: ignore[attr-defined]
    if clip_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    optimizer.step()


@dataclass(frozen=True)
class Update:
    """A step that was taken, or is being taken.

    Attributes:
        step: its number, from 1.
        batch: what it was made from.
        parts: the batch as it was gone through.
        rate: learning rate.
        numbers: loss and norm of the gradients, (2,) in the host's memory; there once `ready`.
        ready: None: at once.
    """

    step: int
    batch: Batch
    parts: list[Batch]
    rate: float
    numbers: Tensor
    ready: torch.cuda.Event | None

    @property
    def under_way(self) -> bool:
        """Whether the device may still be at it, so that the host had better do something else."""
        return self.ready is not None

    def read(self) -> tuple[float, float]:
        """Loss and norm of the gradients, as soon as the device has them."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm = self.numbers.tolist()
        return loss, norm


def send(loss: Tensor, norm: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Both numbers on their way to the host, and the event of their arrival; None where they are there already."""
    numbers = torch.stack([loss.detach().double(), norm.detach().double()])
    if not numbers.is_cuda:
        return numbers, None
    arriving = torch.empty(2, dtype=numbers.dtype, pin_memory=True)
    arriving.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return arriving, ready
