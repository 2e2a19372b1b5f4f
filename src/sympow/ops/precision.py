"""Keeping to the dtype a computation was written for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast leaves dtypes alone; on the meta device, which has no autocast, none at all."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device_type=device.type, enabled=False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the portable paths compute and keep states in, by the dtype of their inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
