"""One update of the parameters, whose numbers may still be on their way from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sympow.data.batch import Batch


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
