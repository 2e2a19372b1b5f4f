"""Makes transformers' Auto classes know sympow's once both packages are imported, in either order.

Importing sympow must not import transformers, which takes seconds. So an import hook waits for the two modules of
transformers that hold the Auto classes; importing ours then registers them, which they do themselves.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Module of transformers → ours, which registers what it defines.
REGISTRARS = {
    "transformers.models.auto.configuration_auto": "sympow.hf.config",
    "transformers.models.auto.modeling_auto": "sympow.hf.modeling",
}


def register_with_transformers() -> None:
    """Registers now what can be, and the rest as soon as transformers imports its Auto classes."""
    for awaited in REGISTRARS:
        if awaited in sys.modules:
            _register(awaited)
    if not any(isinstance(finder, _AutoClassesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoClassesFinder())


def publish(*classes: type) -> None:
    """Makes classes attributes of transformers, where trl and `transformers serve` look for what a checkpoint names.

    There may be two modules of that name: transformers runs its own `__init__` again, and so replaces the module that
    others have imported before.
    """
    holders = [sys.modules, *(vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType))]
    held = (holder.get("transformers") for holder in holders)
    for module in held:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            for published in classes:
                setattr(module, published.__name__, published)


class _AutoClassesFinder(MetaPathFinder):
    """Finds what the other finders find, and has the awaited modules followed by ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRARS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                _follow(spec)
                return spec
        return None


def _follow(spec: ModuleSpec) -> None:
    """Has the loader of a module register ours after it."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register(spec.name)

    # On the loader found rather than a wrapper around it: it stays what inspection expects.
    loader.exec_module = exec_module  # type: ignore[method-assign]


def _register(awaited: str) -> None:
    try:
        # If it is just being imported, and this is why, it registers at its end.
        import_module(REGISTRARS[awaited])
    except ImportError as error:
        # transformers works without sympow; that it does not know sympow's models is worth a word.
        warnings.warn(f"sympow could not register its models with transformers: {error}", stacklevel=2)
