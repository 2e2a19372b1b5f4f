"""sympow models in transformers: config, models, cache, and conversion to and from native models.

`import sympow` registers them with transformers' Auto classes. Names are loaded when they are first asked for, so that
importing this package does not import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympow.hf.cache import SympowCache
    from sympow.hf.config import SympowConfig
    from sympow.hf.conversion import (
        convert_to_native,
        convert_to_transformers,
        from_native,
        to_fast_tokenizer,
        to_native,
    )
    from sympow.hf.modeling import SympowForCausalLM, SympowForSequenceClassification, SympowModel

_HOMES = {
    "SympowCache": "cache",
    "SympowConfig": "config",
    "SympowForCausalLM": "modeling",
    "SympowForSequenceClassification": "modeling",
    "SympowModel": "modeling",
    "convert_to_native": "conversion",
    "convert_to_transformers": "conversion",
    "from_native": "conversion",
    "to_fast_tokenizer": "conversion",
    "to_native": "conversion",
}

__all__ = [
    "SympowCache",
    "SympowConfig",
    "SympowForCausalLM",
    "SympowForSequenceClassification",
    "SympowModel",
    "convert_to_native",
    "convert_to_transformers",
    "from_native",
    "to_fast_tokenizer",
    "to_native",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "transformers is not installed; it comes with: pip install 'conformal-sympow[hf]'", name="transformers"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
