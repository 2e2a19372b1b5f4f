"""Timing with its spread, and a description of what it was taken on."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sympow.files import write_atomically

# On a GPU, one sample is as many calls in a row as take this long: then the host runs ahead of the device, as it does
# in a training step, and what is timed is the device's work and not the first call's way to it.
SAMPLE_SECONDS = 0.04
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
    return measure_in_turns({"": function}, runs=runs, warmup=warmup, device=device)[""]


def measure_in_turns(
    functions: Mapping[str, Callable[[], Any]],
    *,
    runs: int = 5,
    warmup: int = 1,
    device: str = "cpu",
    after_round: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Times several calls beside each other, a sample of each in every round.

    A GPU lowers its clock as it grows hot and draws power: one method timed after another would be timed on a slower
    machine. In turns, what changes over the rounds changes for all.

    Args:
        functions: what to time, by name.
        runs: rounds that count.
        warmup: calls of each before them; on a GPU a round follows that is not counted either.
        device: where the work happens, "cpu" or "cuda".
        after_round: called after each round, and once more after the calls that are not counted.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    on_gpu = device.startswith("cuda")
    once = _time_on_gpu if on_gpu else _time_on_cpu
    calls = dict.fromkeys(functions, 1)
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        if on_gpu:
            calls[name] = min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / once(function, 1)))
            once(function, calls[name])
    if after_round is not None:
        after_round()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs):
        for name, function in functions.items():
            samples[name].append(once(function, calls[name]))
        if after_round is not None:
            after_round()
    return {
        name: Timing(statistics.median(times), min(times), max(times), runs, calls[name])
        for name, times in samples.items()
    }


def environment(device: str = "cpu") -> dict[str, Any]:
    """Device and versions, for the head of a result file."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    found = {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    triton = installed_version("triton")
    return found if triton is None else {**found, "triton": triton}


def installed_version(package: str) -> str | None:
    """Of a package that is installed, without importing it; None: it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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


def save_results(
    path: Path,
    environment: Mapping[str, Any] | None,
    *,
    command: str | None = None,
    indent: int = 2,
    **content: Any,
) -> None:
    """Writes JSON: the command first, then device and versions, then the rest in the order given.

    Args:
        path: the file; its folder is made.
        environment: as of `sympow.bench.timing.environment`; None where nothing was measured.
        command: that makes the file again; by default how this process was started.
        indent: of the JSON.
        content: the setting, rows, and what else there is.
    """
    head: dict[str, Any] = {"command": command or " ".join(["python", *sys.argv])}
    if environment is not None:
        head["environment"] = dict(environment)
    write_atomically(path, (json.dumps({**head, **content}, indent=indent) + "\n").encode())
