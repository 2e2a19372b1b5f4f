"""The small projections behind gates and rotations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


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
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = None if bias is None else nn.Parameter(torch.full((outputs,), bias))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return linear(x.to(dtype), self.weight.to(dtype), bias)
