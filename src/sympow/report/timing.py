"""Timing with its spread, and a description of what it was taken on."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds a call took: the median of several, with the fastest and slowest."""

    median: float
    fastest: float
    slowest: float
    runs: int

    @property
    def spread(self) -> float:
        """(slowest − fastest) / median."""
        return (self.slowest - self.fastest) / self.median


def measure(function: Callable[[], Any], *, runs: int = 5, warmup: int = 1, device: str = "cpu") -> Timing:
    """Times a call after some that are not counted; on a GPU, with the device's own clock.

    Args:
        function: what to time.
        runs: calls that count.
        warmup: calls before them.
        device: where the work happens, "cpu" or "cuda".
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    for _ in range(warmup):
        function()
    once = _time_on_gpu if device.startswith("cuda") else _time_on_cpu
    times = [once(function) for _ in range(runs)]
    return Timing(statistics.median(times), min(times), max(times), runs)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Device and versions, for the head of a result file."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _time_on_cpu(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _time_on_gpu(function: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
