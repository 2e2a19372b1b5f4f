"""Registers sympow with transformers once both packages are imported, in either order: its models with the Auto
classes, and its attention function.

Importing sympow must not import transformers, which takes seconds. So an import hook waits until transformers imports
the modules with its Auto classes and its attention interface, and then imports the modules of sympow.hf, which
register themselves with these.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The model type in configs of pretrained models with swapped attention; that of our own is in `SympowConfig`.
SWAPPED_TYPE = "sympow_swapped"

MODELS, LAYERS = "transformers.models.auto.modeling_auto", "transformers.modeling_layers"
# Module of transformers → the modules here that register something with it. Our models need both MODELS and LAYERS. If
# a model of transformers is imported by its own name, transformers imports MODELS while it executes LAYERS.
REGISTRARS = {
    "transformers.models.auto.configuration_auto": ("sympow.hf.model.config", "sympow.hf.swap.classes"),
    MODELS: ("sympow.hf.model.modeling",),
    LAYERS: ("sympow.hf.model.modeling",),
    "transformers.modeling_utils": ("sympow.hf.swap.attention_function",),
}


def register_with_transformers() -> None:
    """Registers the models now if the Auto classes are imported, else as soon as they are."""
    for awaited in REGISTRARS:
        if awaited in sys.modules:
            _register(awaited)
    if not any(isinstance(finder, _AutoClassesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoClassesFinder())


def publish(*classes: type) -> None:
    """Makes classes attributes of transformers, where trl and `transformers serve` look up a checkpoint's class.

    There may be two modules called transformers: it executes its own `__init__` again, which replaces the module that
    others have imported before.
    """
    holders = [sys.modules, *(vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType))]
    held = (holder.get("transformers") for holder in holders)
    for module in held:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            for published in classes:
                setattr(module, published.__name__, published)


class _AutoClassesFinder(MetaPathFinder):
    """Finds the awaited modules by the other finders, and registers our models after their execution."""

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
    """Makes the loader of a module register our models after its execution."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register(spec.name)

    # Patched rather than wrapped: `inspect` expects the loader's own type.
    loader.exec_module = exec_module  # type: ignore[method-assign]


def _register(awaited: str) -> None:
    if awaited == MODELS and getattr(getattr(sys.modules.get(LAYERS), "__spec__", None), "_initializing", False):
        # LAYERS is being executed; the hook registers the same models when it is finished.
        return
    try:
        # If our module is being imported itself, and imported the awaited one, it registers at its end.
        for registrar in REGISTRARS[awaited]:
            import_module(registrar)
    except ImportError as error:
        # transformers itself works without sympow's models, so this is a warning.
        warnings.warn(f"sympow could not register its models with transformers: {error}", stacklevel=2)
