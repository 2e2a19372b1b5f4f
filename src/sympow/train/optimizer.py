"""Adam with a learning rate per group of parameters, and its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sympow.train.config import OptimizerConfig

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
