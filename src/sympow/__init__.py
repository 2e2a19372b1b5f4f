"""Conformal symmetric power transformers: attention whose past fits in a state of fixed size.

`attention` is the operator, `ConformalAttention` the layer, `GPT` the model.
"""

from sympow.hf.registration import register_with_transformers
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

__version__ = "0.1.0"

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

register_with_transformers()
del register_with_transformers
