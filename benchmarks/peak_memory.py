"""Peak memory of tensors, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of live tensors that were created while the mode is active.

    Unlike the resident memory of the process, the count does not depend on the allocator, so tests can assert on it. It
    does not see what a single operation allocates internally.

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


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results. Far faster than `torch.utils._pytree`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors_in(member)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
