"""Conversion of pretrained softmax transformers: `convert(teacher, config, out)`, and the command `sympow convert`.

Names are imported lazily, so that other commands do not wait for transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympow.convert.config import ConvertConfig
    from sympow.convert.conversion import convert

_HOMES = {"ConvertConfig": "config", "convert": "conversion"}

__all__ = ["ConvertConfig", "convert"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
