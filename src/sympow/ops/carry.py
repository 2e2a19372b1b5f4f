"""What passes from token to token inside a call: a state whose keys carry the call's own scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sympow.ops.scaling import key_exponent, power_of_two
from sympow.ops.sequence import Sequence
from sympow.ops.state import State


@dataclass
class Carry:
    """A state in units of keys divided by 2^exponent. Before the first token kv and normalizer may be None: zero."""

    exponent: Tensor
    kv: Tensor | None = None
    normalizer: Tensor | None = None
    phase: Tensor | None = None


def enter(sequence: Sequence, state: State | None) -> Carry:
    """The carry a call starts from; its tensors are never the given state's own."""
    power, dtype = sequence.power, sequence.compute_dtype
    normalizer = None if state is None else state.normalizer
    exponent = key_exponent(sequence.k, normalizer, power, dtype)
    if state is None:
        return Carry(exponent)
    return Carry(
        exponent,
        kv=_scaled(state.kv.to(dtype), -power * exponent),
        normalizer=_scaled(state.normalizer.to(dtype), -power * exponent),
        phase=state.phase,
    )


def leave(sequence: Sequence, carry: Carry) -> State:
    """The state a call ends with."""
    assert carry.kv is not None
    assert carry.normalizer is not None
    return State(
        kv=_scaled(carry.kv, sequence.power * carry.exponent),
        normalizer=_scaled(carry.normalizer, sequence.power * carry.exponent),
        phase=carry.phase,
        power=sequence.power,
        key_dim=sequence.key_dim,
    )


def _scaled(x: Tensor, exponent: Tensor) -> Tensor:
    """x · 2^exponent, one exponent per sequence and head: x is (b, h_kv, ...)."""
    return x * power_of_two(exponent, x.dtype).reshape(*exponent.shape, *[1] * (x.ndim - 2))
