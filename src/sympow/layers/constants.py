"""Tables of numbers that must keep their precision whatever happens to a module's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConstantTable(nn.Module):
    """A float64 tensor that follows its module between devices but not between dtypes.

    A plain buffer would be rounded by `module.to(torch.bfloat16)`, and a rotation rate's rounding is multiplied by the
    position. Casts leave integer buffers alone, so the bits are kept as int64. Not part of the state dict: what is
    constant is known from the configuration.
    """

    _bits: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("_bits", values.to(torch.float64).view(torch.int64), persistent=False)

    def forward(self) -> Tensor:
        return self._bits.view(torch.float64)
