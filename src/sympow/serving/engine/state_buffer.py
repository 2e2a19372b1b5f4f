"""`StateBuffer`: the state of one sequence at a fixed place in memory, where CUDA graphs read and write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.layers.mixers import ConformalAttention, LayerState
from sympow.model.gpt import GPT, ModelState
from sympow.ops.compilation import conv_shape
from sympow.ops.numerics import compute_dtype
from sympow.ops.state import State


class StateBuffer:
    """A place for the state of one sequence, zero at first.

    Graphs that run one after the other can share one. Copies in and out are one launch for all layers.

    Args:
        model: with symmetric power attention.

    Attributes:
        layers: the state, whose tensors stay where they are.
    """

    def __init__(self, model: GPT) -> None:
        weight = model.embedding.weight
        layers = []
        for block in model.blocks:
            mixer = block.mixer
            assert isinstance(mixer, ConformalAttention)
            state = State.zeros(
                1,
                mixer.key_value_heads,
                mixer.head_dim,
                mixer.head_dim,
                mixer.power,
                rotated=model.config.rotary != "none",
                dtype=compute_dtype(weight.dtype),
                device=weight.device,
            )
            layers.append(replace(state, conv_state=mixer.initial_conv_state(1, weight.dtype, weight.device)))
        self.layers = tuple(layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def load(self, state: ModelState | None) -> None:
        """Copies a state into the buffer; None: that before the first token.

        Raises:
            ValueError, TypeError: the state is that of another model, or holds keys and values.
        """
        if state is None:
            for group in _by_member(self.layers):
                torch._foreach_zero_(group)
        else:
            self._check(state)
            _copy(state, self.layers)

    def load_layer(self, number: int, layer: LayerState) -> None:
        """Copies the state of one layer into the buffer; of the same model, which is not checked."""
        assert isinstance(layer, State)
        _copy((layer,), self.layers[number : number + 1])

    def copy(self) -> ModelState:
        """A copy of what is in the buffer."""
        copied = tuple(layer._map(torch.empty_like) for layer in self.layers)
        _copy(self.layers, copied)
        return copied

    def _check(self, state: ModelState) -> None:
        """Refuses what a copy might broadcast."""
        if len(state) != len(self.layers):
            raise ArgumentError("state", f"must have an entry for each of {len(self.layers)} layers, got {len(state)}")
        for number, (layer, own) in enumerate(zip(state, self.layers, strict=True)):
            if not isinstance(layer, State):
                raise ArgumentTypeError(
                    "state", f"must hold a State for each layer, got {type(layer).__name__} for layer {number}"
                )
            kinds = [(x.power, x.key_dim, tuple(x.kv.shape), x.phase is not None, conv_shape(x)) for x in (layer, own)]
            if kinds[0] != kinds[1]:
                raise ArgumentError(
                    "state",
                    "must agree with the model in (power, key dim, shape of kv, rotated, short_conv); "
                    f"layer {number} has {kinds[0]}, expected {kinds[1]}",
                )


def _by_member(state: Sequence[State] | ModelState) -> list[list[Tensor]]:
    """The tensors of all layers, grouped by what they are: each group has one dtype, and is copied in one launch."""
    members = [layer._tensors() for layer in state]
    return [[layer[name] for layer in members] for name in members[0]]


def _copy(source: ModelState, target: Sequence[State] | ModelState) -> None:
    for from_group, to_group in zip(_by_member(source), _by_member(target), strict=True):
        torch._foreach_copy_(to_group, from_group)
