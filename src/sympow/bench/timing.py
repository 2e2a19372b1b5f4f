"""Timing of calls with its spread, peak memory of tensors, and the result files that both are written to."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class PeakMemory(TorchDispatchMode):
    """Counts bytes of tensors made while active, for as long as they live. Tensors that existed before do not count.

    Unlike the process's resident memory this does not depend on the allocator, so it can be asserted on; what a single
    operation uses inside is not seen.

    Example:
        >>> with PeakMemory() as memory:
        ...     y = torch.ones(1000) + 1
        >>> memory.peak
        8000
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.largest = 0
        self._live: dict[int, int] = {}
        self._foreign: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            self._exempt(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._track(tensor.untyped_storage())
        return result

    def _exempt(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live and key not in self._foreign:
            self._foreign.add(key)
            weakref.finalize(storage, self._foreign.discard, key)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._foreign:
            return
        size = storage.nbytes()
        self._live[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


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


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """What operators take and return: tensors, in lists or tuples perhaps. Far faster than a walk through any tree."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors_in(member)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
