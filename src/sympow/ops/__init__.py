"""Symmetric power attention as functions of tensors: `attention`, its `State`, its feature map and its rotations.

`interface` has the operator, and `dispatch` decides its form and backend. The forms in plain PyTorch are in `torch`,
the kernels in `sympow.kernels`, the paper's equations in `reference`.

    attention form   scores of all pairs of tokens, quadratic in the length
    chunked form     scores within chunks of tokens; earlier chunks are queried through a state
    recurrent form   token by token, all earlier tokens through a state
    state            S = Σ φ(k) vᵀ and Z = Σ φ(k), decayed by the gates, of a size that does not grow
    to fold          to add φ(k) vᵀ and φ(k) of some tokens to a state
    window           the recent tokens, as keys and values, that are not yet folded into the state
"""

from sympow.ops.interface import attention
from sympow.ops.rotary import accumulate_phase, rotary_rates, rotate
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_power, symmetric_power_of_matrix
from sympow.ops.window import Window
from sympow.settings import symmetric_dim

__all__ = [
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
