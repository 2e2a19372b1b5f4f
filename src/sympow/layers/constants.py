"""Tables of numbers that must keep their precision whatever happens to a module's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class ConstantTable(nn.Module):
    """A float64 tensor, known from the configuration, on whatever device it is asked for.

    Not a buffer: `module.to(torch.bfloat16)` would round a buffer, and a rotation rate's rounding is multiplied by the
    position; and a module made on the meta device would find it uninitialised. The tensor follows the module from
    device to device, and is made again from plain numbers when it is wanted on yet another.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        if values.is_meta:
            raise ValueError("values must hold numbers, got a tensor on the meta device")
        self.values = tuple(values.tolist())
        self._table = self._on(torch.device("cpu"))

    def forward(self, device: torch.device) -> Tensor:
        if self._table.device == device:
            return self._table
        table = self._on(device)
        # Not while a compiler traces: what it makes must not outlive the trace, and a compiled module would be compiled
        # anew because of the change.
        if type(table) is Tensor and not torch.compiler.is_compiling():
            self._table = table
        return table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `module.to` does to parameters, as far as the device is concerned.
        device = fn(torch.empty(0, device=self._table.device)).device
        if device.type != "meta" and device != self._table.device:
            self._table = self._on(device)
        return super()._apply(fn, recurse)

    def _on(self, device: torch.device) -> Tensor:
        # A tensor made in inference mode could not take part in a later backward pass.
        with torch.inference_mode(False):
            return torch.tensor(self.values, dtype=torch.float64, device=device)
