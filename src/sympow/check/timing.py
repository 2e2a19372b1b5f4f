"""Timing of calls (median and range), and the JSON files of benchmark results."""

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

from sympow.errors import ArgumentError
from sympow.files import write_atomically

# On a GPU, a sample is a sequence of calls that takes about this long. The host then runs ahead of the device, as in a
# training step, and the launch latency of the first call does not count.
SAMPLE_SECONDS = 0.04
MOST_CALLS = 100


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, the fastest and the slowest of several samples.

    Attributes:
        runs: number of samples.
        calls: number of consecutive calls that a sample averages.
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
    """Times a call after a warm-up; on a GPU with CUDA events around many consecutive calls.

    Args:
        function: the call to time.
        runs: number of samples.
        warmup: number of calls before the first sample.
        device: "cpu" or "cuda".
    """
    return measure_interleaved({"": function}, runs=runs, warmup=warmup, device=device)[""]


def measure_interleaved(
    functions: Mapping[str, Callable[[], Any]],
    *,
    runs: int = 5,
    warmup: int = 1,
    device: str = "cpu",
    after_round: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Times several calls with interleaved samples: each round takes one sample of every call.

    A GPU lowers its clock as it heats up, so a call that is timed after another would be timed on a slower device. With
    interleaved samples a change of the clock affects all calls alike.

    Args:
        functions: the calls to time, by name.
        runs: number of rounds.
        warmup: number of calls of each function before the first round; on a GPU, one more sample is discarded.
        device: "cpu" or "cuda".
        after_round: called after the warm-up and after each round.
    """
    if runs < 1:
        raise ArgumentError("runs", f"must be at least 1, got {runs}")
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
    """Device and versions, as the header of a result file."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()
    found = {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    triton = installed_version("triton")
    return found if triton is None else {**found, "triton": triton}


def _processor() -> str:
    """The model of the CPU where Linux tells it, otherwise what Python knows."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text("utf-8", "replace").splitlines() if listed.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it; None if it is not installed."""
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
        path: the file; missing parent folders are created.
        environment: the result of `sympow.check.timing.environment`; None if nothing was measured.
        command: the command that reproduces the file; by default the command line of this process.
        indent: indentation of the JSON.
        content: further entries, such as the setting and the rows.
    """
    head: dict[str, Any] = {"command": command or " ".join(["python", *sys.argv])}
    if environment is not None:
        head["environment"] = dict(environment)
    write_atomically(path, (json.dumps({**head, **content}, indent=indent) + "\n").encode())
