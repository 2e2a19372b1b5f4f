"""Tables of numbers that must keep their precision whatever happens to a module's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConstantTable(nn.Module):
    """A float64 tensor, known from the configuration, on whatever device it is asked for.

    Not a buffer: `module.to(torch.bfloat16)` would round a buffer, and a rotation rate's rounding is multiplied by the
    position; and a module made on the meta device would find it uninitialised. The tensor is made again from plain
    numbers when it is wanted on another device.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        if values.is_meta:
            raise ValueError("values must hold numbers, got a tensor on the meta device")
        self.values = tuple(values.tolist())
        self._table: Tensor | None = None

    def forward(self, device: torch.device) -> Tensor:
        if self._table is not None and self._table.device == device:
            return self._table
        # A tensor made in inference mode could not take part in a later backward pass.
        with torch.inference_mode(False):
            table = torch.tensor(self.values, dtype=torch.float64, device=device)
        if type(table) is Tensor:  # not one of a tracer's stand-ins, which must not outlive the trace
            self._table = table
        return table
