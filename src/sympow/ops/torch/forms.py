"""The attention, chunked and recurrent forms in plain PyTorch, for any device and floating-point dtype.

Inside a call the state is kept in units of keys divided by a power of two (`Carry`), so that no score overflows
(`sympow.ops.numerics`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.compilation import slices
from sympow.ops.dispatch import portable_chunk
from sympow.ops.inputs import Inputs, divide, prepare
from sympow.ops.numerics import feature_decay, least_exponent, power_of_two, state_exponents
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_power
from sympow.ops.torch.products import (
    LARGEST_POWER_WITHOUT_UNITS,
    Sums,
    attend_to_past,
    attend_to_self,
    causal_attention,
    drop_rounding,
    joined,
    multiply,
    query_state,
    update_state,
)
from sympow.settings import symmetric_dim


@dataclass(frozen=True)
class Carry:
    """The state carried between chunks, in units of keys divided by 2^exponent.

    Attributes:
        exponent: (b, h_kv) int32.
        kv, normalizer, phase: as in `State`. They belong to the call, which may change them in place. kv and normalizer
            are None before the first token where no state was given.
    """

    exponent: Tensor
    kv: Tensor | None = None
    normalizer: Tensor | None = None
    phase: Tensor | None = None


def enter(inputs: Inputs, state: State | None) -> Carry:
    """The state carry a call starts from; its kv and normalizer are copies."""
    if state is None:
        shape = (inputs.batch, inputs.key_heads)
        return Carry(torch.full(shape, least_exponent(inputs.compute_dtype), dtype=torch.int32, device=inputs.q.device))
    normalizer = state.normalizer.to(inputs.compute_dtype)
    exponent = state_exponents(normalizer, inputs.power)
    kv = state.kv.to(inputs.compute_dtype)
    down = -inputs.power * exponent
    return Carry(exponent, kv * _factor(down, kv), normalizer * _factor(down, normalizer), state.phase)


def leave(inputs: Inputs, carry: Carry, *, in_place: bool) -> State:
    """The state a call ends with, in units of the keys themselves.

    Args:
        in_place: whether to overwrite the carry: a second copy of a large state may not fit into memory.
    """
    assert carry.kv is not None
    assert carry.normalizer is not None
    kv, normalizer = carry.kv, carry.normalizer
    exponent = inputs.power * carry.exponent
    # In two factors, since one may overflow where the product does not.
    for half in (exponent // 2, exponent - exponent // 2):
        kv = multiply(kv, _factor(half, kv), in_place=in_place)
        normalizer = multiply(normalizer, _factor(half, normalizer), in_place=in_place)
    return State(kv, normalizer, carry.phase, power=inputs.power, key_dim=inputs.key_dim)


def _factor(exponent: Tensor, x: Tensor) -> Tensor:
    """2^exponent, one per sequence and head, for x (b, h_kv, ...)."""
    return power_of_two(exponent, x.dtype).reshape(*exponent.shape, *[1] * (x.ndim - 2))


def chunked_form(
    inputs: Inputs, state: State | None, return_state: bool, chunk_size: int | None, needs_grad: bool
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for; chunk_size None: the attention form."""
    power = inputs.power
    carry = enter(inputs, state)
    outputs: list[Tensor] = []
    # Without gradients outputs are written into one buffer, so that there is never a second copy of them.
    buffer = None if needs_grad else inputs.q.new_empty(*inputs.q.shape[:3], inputs.value_dim)

    chunks = slices(inputs.length, chunk_size)
    parts = [inputs] if chunk_size is None or len(chunks) == 1 else inputs.split(chunk_size)
    for number, (tokens, part) in enumerate(zip(chunks, parts, strict=True), start=1):
        chunk = prepare(part, carry.phase, carry.exponent)
        sums = causal_attention(chunk.q, chunk.k, chunk.v, chunk.decay, power)
        if carry.kv is not None and carry.normalizer is not None:
            sums = sums.plus(query_state(chunk.q, chunk.decay, carry.kv, carry.normalizer, power))
        y = divide(sums.numerator, sums.denominator, inputs.q.dtype)
        if buffer is None:
            outputs.append(y)
        else:
            buffer[:, tokens] = y
        if return_state or number < len(chunks):
            kv, normalizer = update_state(
                chunk.k, chunk.v, chunk.decay, carry.kv, carry.normalizer, power, in_place=not needs_grad
            )
            carry = Carry(chunk.exponent, kv, normalizer, chunk.phase)

    y = torch.cat(outputs, dim=1) if buffer is None else buffer
    return y, leave(inputs, carry, in_place=not needs_grad) if return_state else None


def recurrent_form(
    inputs: Inputs, state: State | None, return_state: bool, needs_grad: bool
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for."""
    power = inputs.power
    carry = enter(inputs, state)
    tokens = prepare(inputs, carry.phase, carry.exponent)
    steps = tokens.decay.diff(dim=2, prepend=torch.zeros_like(tokens.decay[:, :, :1]))

    heads = (inputs.batch, inputs.key_heads, symmetric_dim(inputs.key_dim, power))
    kv = carry.kv if carry.kv is not None else tokens.v.new_zeros(*heads, inputs.value_dim)
    normalizer = carry.normalizer if carry.normalizer is not None else tokens.v.new_zeros(*heads)

    no_decay = torch.zeros_like(tokens.decay[:, :, :1])
    outputs = []
    for i in range(inputs.length):
        key = symmetric_power(tokens.k[:, :, i], power)  # (b, h_kv, D)
        query = tokens.q[:, :, :, i : i + 1]  # (b, h_kv, g, 1, d)
        value = tokens.v[:, :, i]  # (b, h_kv, e)
        gamma = feature_decay(steps[:, :, i], power, inputs.compute_dtype)
        kv = multiply(kv, gamma.unsqueeze(-1), in_place=not needs_grad)
        normalizer = multiply(normalizer, gamma, in_place=not needs_grad)
        # The past through its state; the token itself by its score, which is exact where a difference of features
        # is not. Everything with a time axis of one.
        if power > LARGEST_POWER_WITHOUT_UNITS:
            past = query_state(query, no_decay, kv, normalizer, power)
        else:
            features, weights = symmetric_power(query.squeeze(3), power), normalizer.unsqueeze(-1)
            magnitude = features.detach().abs() @ weights.detach().abs()
            past = Sums(*drop_rounding((features @ kv).unsqueeze(3), features @ weights, magnitude))
        own = attend_to_self(query, tokens.k[:, :, i : i + 1], tokens.v[:, :, i : i + 1], power)
        outputs.append(past.plus(own))
        if needs_grad:
            kv = kv + key.unsqueeze(-1) * value.unsqueeze(-2)
            normalizer = normalizer + key
        else:
            kv.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
            normalizer.add_(key)

    sums = joined(outputs, dim=3)
    y = divide(sums.numerator, sums.denominator, inputs.q.dtype)
    carry = Carry(tokens.exponent, kv, normalizer, tokens.phase)
    return y, leave(inputs, carry, in_place=not needs_grad) if return_state else None


def run_portable(
    inputs: Inputs,
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
        return recurrent_form(inputs, state, return_state, needs_grad)
    size = portable_chunk(inputs, form, chunk_size, initial_state=state is not None, return_state=return_state)
    return chunked_form(inputs, state, return_state, size, needs_grad)


def fold(inputs: Inputs, state: State | None = None, phase: Tensor | None = None) -> State:
    """Folds at least one token into a state: adds φ(k) vᵀ of each to S, and φ(k) to Z (paper §2.1).

    Args:
        inputs: the tokens; their queries do not matter.
        state: the state before them, or None.
        phase: without a state, μ before the first token, (b, h_kv, d/2) float64; None: zero.
    """
    carry = enter(inputs, state)
    needs_grad = inputs.needs_grad or (torch.is_grad_enabled() and state is not None and state.requires_grad)
    # `prepare` needs queries of the same length; any will do.
    tokens = prepare(replace(inputs, q=inputs.k), carry.phase if state is not None else phase, carry.exponent)
    kv, normalizer = update_state(
        tokens.k, tokens.v, tokens.decay, carry.kv, carry.normalizer, inputs.power, in_place=not needs_grad
    )
    return leave(inputs, Carry(tokens.exponent, kv, normalizer, tokens.phase), in_place=not needs_grad)


def run_late_queries(
    inputs: Inputs,
    state: State | None,
    return_state: bool,
    by_scores: bool | None,
    run: Callable[[Inputs, State | None], tuple[Tensor, State | None]],
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e) of a call with fewer queries than keys, and the state after the last token if asked for.

    The queries are those of the last tokens, as with a cache of keys and values. Either they attend to the earlier keys
    by scores, or the earlier keys and values are folded into a state, after which the last tokens are an ordinary call.

    Args:
        inputs: with the keys of all tokens and the queries of the last ones.
        state: the state before the first key, or None.
        return_state: whether to return the state after the last token.
        by_scores: whether to attend by scores; None: whichever takes fewer operations.
        run: runs an ordinary call of the last tokens after a state.
    """
    queries, earlier = inputs.q.shape[1], inputs.k.shape[1] - inputs.q.shape[1]
    # What is computed for the padding is small beside a score.
    whole = replace(inputs, q=pad(inputs.q, (0, 0, 0, 0, earlier, 0)))
    if by_scores is None:
        features = symmetric_dim(inputs.key_dim, inputs.power) * (inputs.value_dim + 1)
        scores = inputs.group * queries * earlier * (inputs.key_dim + inputs.value_dim + 1)
        by_scores = scores <= (earlier + inputs.group * queries) * features
    if by_scores and queries:
        return _attend_late(whole, queries, state, return_state)
    return run(whole[earlier:], fold(whole[:earlier], state))


def _attend_late(inputs: Inputs, queries: int, state: State | None, return_state: bool) -> tuple[Tensor, State | None]:
    """The last `queries` queries attend by scores to all keys and, if there is one, to the state before them."""
    power = inputs.power
    carry = enter(inputs, state)
    tokens = prepare(inputs, carry.phase, carry.exponent)
    past, own = slice(0, inputs.length - queries), slice(inputs.length - queries, None)
    q, k, v, decay = tokens.q[:, :, :, own], tokens.k, tokens.v, tokens.decay
    sums = causal_attention(q, k[:, :, own], v[:, :, own], decay[:, :, own], power)
    sums = sums.plus(attend_to_past(q, k[:, :, past], v[:, :, past], decay[:, :, own], decay[:, :, past], power))
    if carry.kv is not None and carry.normalizer is not None:
        sums = sums.plus(query_state(q, decay[:, :, own], carry.kv, carry.normalizer, power))
    y = divide(sums.numerator, sums.denominator, inputs.q.dtype)
    if not return_state:
        return y, None
    kv, normalizer = update_state(k, v, decay, carry.kv, carry.normalizer, power, in_place=False)
    return y, leave(inputs, Carry(tokens.exponent, kv, normalizer, tokens.phase), in_place=False)
