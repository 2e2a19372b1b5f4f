"""What passes from token to token inside a call: a state whose keys are divided by a power of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sympow.ops.blocks import multiply
from sympow.ops.scaling import least_exponent, power_of_two, state_exponents
from sympow.ops.sequence import Sequence
from sympow.ops.state import State


@dataclass(frozen=True)
class Carry:
    """A state in units of keys divided by 2^exponent. Before the first token kv and normalizer may be None: zero.

    Attributes:
        exponent: (b, h_kv) int32.
        kv, normalizer, phase: as in `State`; owned by the call, so it may change them in place.
    """

    exponent: Tensor
    kv: Tensor | None = None
    normalizer: Tensor | None = None
    phase: Tensor | None = None


def enter(sequence: Sequence, state: State | None) -> Carry:
    """The carry a call starts from; its kv and normalizer are copies."""
    if state is None:
        shape = (sequence.batch, sequence.key_heads)
        return Carry(
            torch.full(shape, least_exponent(sequence.compute_dtype), dtype=torch.int32, device=sequence.q.device)
        )
    normalizer = state.normalizer.to(sequence.compute_dtype)
    exponent = state_exponents(normalizer, sequence.power)
    kv = state.kv.to(sequence.compute_dtype)
    down = -sequence.power * exponent
    return Carry(exponent, kv * _factor(down, kv), normalizer * _factor(down, normalizer), state.phase)


def leave(sequence: Sequence, carry: Carry, *, in_place: bool) -> State:
    """The state a call ends with, in units of the keys themselves.

    Args:
        in_place: whether the carry may be used up for it; a second copy of a large state may not fit.
    """
    assert carry.kv is not None
    assert carry.normalizer is not None
    kv, normalizer = carry.kv, carry.normalizer
    exponent = sequence.power * carry.exponent
    # In two factors, since one may overflow where the product does not.
    for part in (exponent // 2, exponent - exponent // 2):
        kv = multiply(kv, _factor(part, kv), in_place=in_place)
        normalizer = multiply(normalizer, _factor(part, normalizer), in_place=in_place)
    return State(kv, normalizer, carry.phase, power=sequence.power, key_dim=sequence.key_dim)


def _factor(exponent: Tensor, x: Tensor) -> Tensor:
    """2^exponent, one per sequence and head, for x (b, h_kv, ...)."""
    return power_of_two(exponent, x.dtype).reshape(*exponent.shape, *[1] * (x.ndim - 2))
