"""sympow models in transformers: config, models, cache, conversion to and from native models, and `swap_attention`.

`import sympow` registers them with transformers' Auto classes. Names are loaded when they are first asked for, so that
importing this package does not import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympow.hf.model.cache import SympowCache
    from sympow.hf.model.config import SympowConfig
    from sympow.hf.model.conversion import (
        convert_to_native,
        convert_to_transformers,
        from_native,
        to_fast_tokenizer,
        to_native,
    )
    from sympow.hf.model.modeling import SympowForCausalLM, SympowForSequenceClassification, SympowModel
    from sympow.hf.swap.attention_parts import attention_modules
    from sympow.hf.swap.state_layer import StateLayer
    from sympow.hf.swap.swapped_gpt import SwappedGPT
    from sympow.hf.swap.swapping import swap_attention, swapped_layers

_HOMES = {
    "StateLayer": "swap.state_layer",
    "SwappedGPT": "swap.swapped_gpt",
    "SympowCache": "model.cache",
    "SympowConfig": "model.config",
    "SympowForCausalLM": "model.modeling",
    "SympowForSequenceClassification": "model.modeling",
    "SympowModel": "model.modeling",
    "attention_modules": "swap.attention_parts",
    "convert_to_native": "model.conversion",
    "convert_to_transformers": "model.conversion",
    "from_native": "model.conversion",
    "swap_attention": "swap.swapping",
    "swapped_layers": "swap.swapping",
    "to_fast_tokenizer": "model.conversion",
    "to_native": "model.conversion",
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
