"""The optimizer: parameter groups of AdamW, the learning rate of a step, an update that the device can skip, and β."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sympow.data.loader import Batch
from sympow.layers.rotations import DataDependentRotation
from sympow.train.config import OptimizerConfig

# Key of a parameter group: its learning rate relative to the config's.
RELATIVE_RATE = "relative_rate"


def set_up_rotations(model: nn.Module, config: OptimizerConfig) -> None:
    """Initializes W_β of data-dependent rotations by the config, and sets what becomes of the gradient through β.

    Random values are drawn after those of all other parameters, which therefore do not depend on `rotation_init`, and
    on the CPU, so that they are the same on every device.
    """
    for module in model.modules():
        if not isinstance(module, DataDependentRotation):
            continue
        module.gradient_scale = config.rotation_gradient
        if config.rotation_init:
            weight = module.beta_proj.weight
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, dtype=weight.dtype) * config.rotation_init)


def rate_at(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, of so many."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    passed = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    left = 1 - passed if config.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * left)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over three parameter groups: matrices, with weight decay; W_β of rotations; all others.

    The embedding counts as a matrix. Frozen parameters are left out. The fused
    implementation on a GPU.
    """
    rotation, matrices, others = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if ".beta_proj." in name:
            rotation.append(parameter)
        elif is_decayed(name, parameter.ndim):
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


def is_decayed(name: str, ndim: int) -> bool:
    """Whether a parameter has weight decay: matrices and embeddings, but not those of gates and rotations, nor taps of
    short convolutions, of which some start at 1.
    """
    return ndim >= 2 and not any(part in name for part in ("gate.", ".beta_proj.", ".short_conv."))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group in proportion to its relative rate."""
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
    """Clips the gradients and updates the parameters.

    Args:
        norm: of all gradients together.
        clip_norm: largest norm; 0: no clipping.
        unless: a bool on the device: if true, parameters, gradients and Adam's moments are not changed. Only with the
            fused optimizer.
    """
    if unless is not None:
        norm = norm.masked_fill(unless, 0.0)  # no clipping
        # The fused optimizer skips its update where found_inf is 1, as it does for torch.amp.GradScaler.
        optimizer.found_inf = unless.to(torch.float32)  # type: ignore[attr-defined]
    if clip_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    optimizer.step()


@dataclass(frozen=True)
class Update:
    """An update that was made, or that the device is still computing.

    Attributes:
        step: number of the step, from 1.
        batch: the batch of the step.
        micro_batches: the batch as gradients were accumulated over it.
        rate: learning rate.
        numbers: loss and gradient norm, (2,) in host memory; valid once `ready` has completed.
        ready: event of the copy to the host; None: the numbers are valid.
    """

    step: int
    batch: Batch
    micro_batches: list[Batch]
    rate: float
    numbers: Tensor
    ready: torch.cuda.Event | None

    @property
    def under_way(self) -> bool:
        """Whether the device may still be computing it."""
        return self.ready is not None

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm; waits until the device has computed them."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm = self.numbers.tolist()
        return loss, norm


def send(loss: Tensor, norm: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Starts to copy both numbers to the host; returns them and the event of their arrival, None on the CPU."""
    numbers = torch.stack([loss.detach().double(), norm.detach().double()])
    if not numbers.is_cuda:
        return numbers, None
    arriving = torch.empty(2, dtype=numbers.dtype, pin_memory=True)
    arriving.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return arriving, ready
