"""How fast a run is, and how much of the device that takes."""

from __future__ import annotations

import time

import torch

from sympow.model.accounting import mixing_operations, other_operations
from sympow.model.config import GPTConfig

# Dense bfloat16 operations a second, by what the device's name contains.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def training_operations(config: GPTConfig, context: int) -> float:
    """Operations a token takes, forward and backward: three times the forward pass, in the cheaper of two forms.

    What is computed again to save memory does not count, nor do features beyond the D symmetric ones.
    """
    mixing = mixing_operations(config, context)
    attention = mixing.attention if config.mixer == "softmax" else min(mixing.attention, mixing.chunked)
    return 3 * (other_operations(config) + attention)


def peak_operations(device: torch.device) -> float | None:
    """What the device could do at best, if it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class Clock:
    """Tokens a second between two readings."""

    def __init__(self) -> None:
        self._last, self._tokens = time.monotonic(), 0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> float:
        """Tokens a second since the last reading."""
        now = time.monotonic()
        rate = self._tokens / max(now - self._last, 1e-9)
        self._last, self._tokens = now, 0
        return rate

    def restart(self) -> None:
        """Leaves out what happened since the last reading."""
        self._last, self._tokens = time.monotonic(), 0
