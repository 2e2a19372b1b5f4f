"""Attention layers as PyTorch modules, and the gates and rotations they are built from."""

from sympow.layers.gates import make_gate
from sympow.layers.mixers import ConformalAttention, Mixer, SoftmaxAttention
from sympow.layers.rotations import make_rotation
from sympow.settings import GATES, ROTATIONS

__all__ = ["GATES", "ROTATIONS", "ConformalAttention", "Mixer", "SoftmaxAttention", "make_gate", "make_rotation"]
