"""How data-dependent rotations start and learn, where that differs from the rest of a model."""

from __future__ import annotations

import torch
from torch import nn

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
