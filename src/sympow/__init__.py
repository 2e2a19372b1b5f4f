"""Conformal symmetric power transformers: attention whose past fits in a state of fixed size.

`attention` is the operator, `ConformalAttention` the layer, `GPT` the model. Names are loaded when they are first
used: torch takes seconds to import, and some commands do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympow.layers import ConformalAttention
    from sympow.model import GPT, GPTConfig
    from sympow.ops import (
        State,
        Window,
        accumulate_phase,
        attention,
        rotary_rates,
        rotate,
        symmetric_dim,
        symmetric_power,
        symmetric_power_of_matrix,
    )

# The only place that states the version: pyproject.toml reads it from here.
__version__ = "0.2.0"

__all__ = [
    "GPT",
    "ConformalAttention",
    "GPTConfig",
    "State",
    "Window",
    "accumulate_phase",
    "attention",
    "rotary_rates",
    "rotate",
    "symmetric_dim",
    "symmetric_power",
    "symmetric_power_of_matrix",
]

_HOMES = {"ConformalAttention": "layers", "GPT": "model", "GPTConfig": "model"}
# Subpackages that are attributes of the package without an import of their own.
_SUBPACKAGES = ("layers", "model", "ops")


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'ops')}"), name)
        # Later lookups do not call this function.
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
