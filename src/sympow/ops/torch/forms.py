"""What passes from token to token inside a call: a state whose keys are divided by a power of two."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sympow.ops.compilation import stretches
from sympow.ops.dispatch import portable_chunk
from sympow.ops.numerics import feature_decay, least_exponent, power_of_two, state_exponents
from sympow.ops.sequence import Sequence, divide, prepare
from sympow.ops.state import State
from sympow.ops.symmetric import even_power, symmetric_dim, symmetric_power
from sympow.ops.torch.products import causal_attention, drop_rounding, multiply, query_state, update_state


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


def chunked_form(
    sequence: Sequence, state: State | None, return_state: bool, chunk_size: int | None, needs_grad: bool
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for; chunk_size None: the attention form."""
    power = sequence.power
    carry = enter(sequence, state)
    parts: list[Tensor] = []
    # Without gradients outputs go straight into one buffer, so that no second copy of them ever exists.
    buffer = None if needs_grad else sequence.q.new_empty(*sequence.q.shape[:3], sequence.value_dim)

    chunks = stretches(sequence.length, chunk_size)
    for number, tokens in enumerate(chunks, start=1):
        chunk = prepare(sequence[tokens], carry.phase, carry.exponent)
        numerator, denominator = causal_attention(chunk.q, chunk.k, chunk.v, chunk.decay, power)
        if carry.kv is not None and carry.normalizer is not None:
            past = query_state(chunk.q, chunk.decay, carry.kv, carry.normalizer, power)
            numerator, denominator = numerator + past[0], denominator + past[1]
        y = divide(numerator, denominator, sequence.q.dtype)
        if buffer is None:
            parts.append(y)
        else:
            buffer[:, tokens] = y
        if return_state or number < len(chunks):
            kv, normalizer = update_state(
                chunk.k, chunk.v, chunk.decay, carry.kv, carry.normalizer, power, in_place=not needs_grad
            )
            carry = Carry(chunk.exponent, kv, normalizer, chunk.phase)

    y = torch.cat(parts, dim=1) if buffer is None else buffer
    return y, leave(sequence, carry, in_place=not needs_grad) if return_state else None


def recurrent_form(
    sequence: Sequence, state: State | None, return_state: bool, needs_grad: bool
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for."""
    power = sequence.power
    carry = enter(sequence, state)
    tokens = prepare(sequence, carry.phase, carry.exponent)
    steps = tokens.decay.diff(dim=2, prepend=torch.zeros_like(tokens.decay[:, :, :1]))

    heads = (sequence.batch, sequence.key_heads, symmetric_dim(sequence.key_dim, power))
    kv = carry.kv if carry.kv is not None else tokens.v.new_zeros(*heads, sequence.value_dim)
    normalizer = carry.normalizer if carry.normalizer is not None else tokens.v.new_zeros(*heads)

    numerators, denominators = [], []
    for i in range(sequence.length):
        key = symmetric_power(tokens.k[:, :, i], power)  # (b, h_kv, D)
        query = symmetric_power(tokens.q[:, :, :, i], power)  # (b, h_kv, g, D)
        value = tokens.v[:, :, i]  # (b, h_kv, e)
        gamma = feature_decay(steps[:, :, i], power, sequence.compute_dtype)
        kv = multiply(kv, gamma.unsqueeze(-1), in_place=not needs_grad)
        normalizer = multiply(normalizer, gamma, in_place=not needs_grad)
        # The past through its state; the token itself by its score, which is exact where a difference of features
        # is not. Everything with a time axis of one.
        weights = normalizer.unsqueeze(-1)
        past = drop_rounding((query @ kv).unsqueeze(3), query @ weights, query.detach().abs() @ weights.detach().abs())
        score = even_power((tokens.q[:, :, :, i] * tokens.k[:, :, i].unsqueeze(2)).sum(-1), power).unsqueeze(-1)
        numerators.append(past[0] + (score * value.unsqueeze(2)).unsqueeze(3))
        denominators.append(past[1] + score)
        if needs_grad:
            kv = kv + key.unsqueeze(-1) * value.unsqueeze(-2)
            normalizer = normalizer + key
        else:
            kv.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
            normalizer.add_(key)

    y = divide(torch.cat(numerators, dim=3), torch.cat(denominators, dim=3), sequence.q.dtype)
    carry = Carry(tokens.exponent, kv, normalizer, tokens.phase)
    return y, leave(sequence, carry, in_place=not needs_grad) if return_state else None


def run_portable(
    sequence: Sequence,
    state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e) of at least one token, and the state after the last one if asked for.

    Args:
        form, chunk_size: as in `sympow.attention`.
        needs_grad: whether the backward pass will be run.
    """
    if form == "recurrent":
        return recurrent_form(sequence, state, return_state, needs_grad)
    size = portable_chunk(sequence, form, chunk_size, initial_state=state is not None, return_state=return_state)
    return chunked_form(sequence, state, return_state, size, needs_grad)


def fold(sequence: Sequence, state: State | None = None, phase: Tensor | None = None) -> State:
    """The state after a stretch of at least one token, in plain PyTorch.

    Args:
        sequence: the stretch; its queries do not matter.
        state: what came before; None: nothing.
        phase: without a state, μ before the first token, (b, h_kv, d/2) float64; None: zero.
    """
    carry = enter(sequence, state)
    needs_grad = sequence.needs_grad or (torch.is_grad_enabled() and state is not None and state.requires_grad)
    # Keys in place of queries, which are prepared along with them.
    part = prepare(replace(sequence, q=sequence.k), carry.phase if state is not None else phase, carry.exponent)
    kv, normalizer = update_state(
        part.k, part.v, part.decay, carry.kv, carry.normalizer, sequence.power, in_place=not needs_grad
    )
    return leave(sequence, Carry(part.exponent, kv, normalizer, part.phase), in_place=not needs_grad)
