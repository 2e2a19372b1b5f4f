"""Earlier names of public modules, classes, methods and arguments: each still works, and warns with the new name.

The tables below are the only place that knows them. `tests/test_deprecated.py` walks over every entry.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

# Modules, by the names that version 0.1 gave them.
MODULES = {
    "sympow.decoding": "sympow.generation.decoder",
    "sympow.experiment": "sympow.experiments",
    "sympow.generate": "sympow.generation.sampling",
    "sympow.kernels.packing": "sympow.kernels.states.message_packing",
    "sympow.kernels.softmax_step": "sympow.kernels.decode.softmax_step",
    "sympow.memory": "sympow.generation.cache",
    "sympow.ops.backend": "sympow.ops.dispatch",
    "sympow.ops.folding": "sympow.ops.torch.forms",
    "sympow.parallel.fused": "sympow.parallel.fused_attention",
    "sympow.parallel.softmax": "sympow.parallel.context_parallel",
    "sympow.reading": "sympow.generation.prefix",
    "sympow.report.heads": "sympow.evaluate.head_statistics",
    "sympow.text": "sympow.generation.text",
}
# Names within a module; the module calls `module_getattr`.
NAMES = {
    "sympow.evaluate": {"stretches": "document_sequences"},
    "sympow.generation.cache": {"MEMORIES": "CACHE_POLICIES", "Memories": "DecodingCache", "Memory": "CachePolicy"},
    "sympow.generation.prefix": {"Reading": "Prefix"},
}
# Methods and properties; the class has a `deprecated_attribute` for each.
ATTRIBUTES = {
    "sympow.generation.prefix.Prefix": {"start": "prefill", "more": "extend"},
    "sympow.generation.text.TextModel": {"read": "prefill", "read_on": "extend"},
    "sympow.hf.cache.SympowCache": {"memory": "cache_policy"},
    "sympow.ops.window.Window": {
        "bytes_of_a_state": "state_nbytes",
        "bytes_of_a_token": "token_nbytes",
        "most_tokens": "break_even_tokens",
    },
}
# Keyword arguments, for functions under `accepts_old_arguments`.
ARGUMENTS = {"memory": "cache_policy", "piece": "segment_size", "reading": "prefix", "readings": "prefixes"}
# Flags of commands, for `sympow.cli`.
FLAGS = {"--memory": "--cache", "--piece": "--segment-size"}

F = TypeVar("F", bound=Callable[..., Any])


def warn_renamed(old: str, new: str, *, stacklevel: int) -> None:
    """Says that a name is deprecated; at stacklevel 1 for the caller of this function."""
    message = f"{old} is deprecated; use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


def module_getattr(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`, which finds earlier names of what it defines."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        new = NAMES[module].get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{new}", stacklevel=2)
        return getattr(sys.modules[module], new)

    return __getattr__


class deprecated_attribute:  # noqa: N801 - used as `property` is
    """The earlier name of a method or property of the same class.

    Args:
        new: the present name.
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}", stacklevel=2)
        return getattr(owner if instance is None else instance, self._new)


def accepts_old_arguments(function: F) -> F:
    """Lets a function take its keyword arguments by their earlier names in `ARGUMENTS`, too."""
    renamed = [(old, new) for old, new in ARGUMENTS.items() if new in inspect.signature(function).parameters]
    assert renamed, f"{function.__qualname__} has no renamed argument"

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for old, new in renamed:
            if old not in kwargs:
                continue
            if new in kwargs:
                raise TypeError(f"{function.__qualname__} got both {new} and {old}, its deprecated name")
            warn_renamed(f"the argument {old} of {function.__qualname__}", new, stacklevel=2)
            kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return cast("F", wrapper)


def install_module_aliases() -> None:
    """Makes `import` find modules by the earlier names in `MODULES`."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        # Last, so that it is asked only for what no other finder has.
        sys.meta_path.append(_AliasFinder())


class _AliasFinder(MetaPathFinder, Loader):
    """Finds a module by its earlier name: the import gives the present module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warn_renamed(old, MODULES[old], stacklevel=2)
        # `import` returns the entry of sys.modules after the module has been executed.
        sys.modules[old] = import_module(MODULES[old])
