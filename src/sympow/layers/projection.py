"""The small projections behind gates and rotations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sympow.ops.precision import without_autocast


class FloatLinear(nn.Module):
    """x Wᵀ + b in float32 or better, whatever the dtype of x and with or without autocast.

    Gates and rotation scales are summed over the whole sequence; near γ = 1 a bfloat16 logit would leave three
    significant bits of log γ. W starts at zero, so that a layer starts from what the bias says for every input.

    Args:
        inputs: width of x.
        outputs: width of the result.
        bias: initial value of b; None: no bias.
    """

    def __init__(self, inputs: int, outputs: int, bias: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = None if bias is None else nn.Parameter(torch.empty(outputs))
        self.initial_bias = bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W = 0, and the bias where it was asked to start."""
        nn.init.zeros_(self.weight)
        if self.bias is not None and self.initial_bias is not None:
            nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        with without_autocast(x.device):
            return linear(x.to(dtype), self.weight.to(dtype), bias)
