"""Symmetric power attention as functions of tensors: `attention`, its `State`, feature map and rotations."""

from sympow.ops.interface import attention
from sympow.ops.rotary import accumulate_phase, rotary_rates, rotate
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_dim, symmetric_power, symmetric_power_of_matrix
from sympow.ops.window import Window

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
