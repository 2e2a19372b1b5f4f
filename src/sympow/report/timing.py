"""Timing with its spread, and a description of what it was taken on."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# On a GPU, one sample is as many calls in a row as take this long: then the host runs ahead of the device, as it does
# in a training step, and what is timed is the device's work and not the first call's way to it.
SAMPLE_SECONDS = 0.02
MOST_CALLS = 100


@dataclass(frozen=True)
class Timing:
    """Seconds a call took: the median of several samples, with the fastest and slowest.

    Attributes:
        runs: samples.
        calls: calls in a row per sample.
    """

    median: float
    fastest: float
    slowest: float
    runs: int
    calls: int = 1

    @property
    def spread(self) -> float:
        """(slowest − fastest) / median."""
        return (self.slowest - self.fastest) / self.median


def measure(function: Callable[[], Any], *, runs: int = 5, warmup: int = 1, device: str = "cpu") -> Timing:
    """Times a call after some that are not counted; on a GPU many in a row, with the device's own clock.

    Args:
        function: what to time.
        runs: samples that count.
        warmup: calls before them.
        device: where the work happens, "cpu" or "cuda".
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    for _ in range(warmup):
        function()
    on_gpu = device.startswith("cuda")
    once = _time_on_gpu if on_gpu else _time_on_cpu
    calls = min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / once(function, 1))) if on_gpu else 1
    times = [once(function, calls) for _ in range(runs)]
    return Timing(statistics.median(times), min(times), max(times), runs, calls)


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


def _time_on_cpu(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _time_on_gpu(function: Callable[[], Any], calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
