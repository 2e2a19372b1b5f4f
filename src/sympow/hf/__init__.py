"""sympow models in transformers: config, models, cache, conversion to and from native models, and `swap_attention`.

`import sympow` registers them with transformers' Auto classes. Names are loaded when they are first asked for, so that
importing this package does not import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympow.hf.attention_parts import attention_modules
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
    from sympow.hf.state_layer import StateLayer
    from sympow.hf.swapped_gpt import SwappedGPT
    from sympow.hf.swapping import swap_attention, swapped_layers

_HOMES = {
    "StateLayer": "state_layer",
    "SwappedGPT": "swapped_gpt",
    "SympowCache": "cache",
    "SympowConfig": "config",
    "SympowForCausalLM": "modeling",
    "SympowForSequenceClassification": "modeling",
    "SympowModel": "modeling",
    "attention_modules": "attention_parts",
    "convert_to_native": "conversion",
    "convert_to_transformers": "conversion",
    "from_native": "conversion",
    "swap_attention": "swapping",
    "swapped_layers": "swapping",
    "to_fast_tokenizer": "conversion",
    "to_native": "conversion",
}

__all__ = [
    "StateLayer",
    "SwappedGPT",
    "SympowCache",
    "SympowConfig",
    "SympowForCausalLM",
    "SympowForSequenceClassification",
    "SympowModel",
    "attention_modules",
    "convert_to_native",
    "convert_to_transformers",
    "from_native",
    "swap_attention",
    "swapped_layers",
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
