"""Fewer queries than keys: those of the last tokens, as with a cache of keys and values.

Two ways, as with any call. By scores: the queries attend to the earlier keys, and to those of their own tokens. Or by
a state: the earlier keys and values are folded into one, behind which the rest is an ordinary call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.sequence import Sequence, divide, prepare
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_dim
from sympow.ops.torch.forms import Carry, enter, leave
from sympow.ops.torch.products import attend_to_past, causal_attention, query_state, update_state


def run_late_queries(
    sequence: Sequence,
    state: State | None,
    return_state: bool,
    by_scores: bool | None,
    run: Callable[[Sequence, State | None], tuple[Tensor, State | None]],
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e) of the queries, and the state after the last token if asked for.

    Args:
        sequence: its keys are of all tokens, its queries of the last ones.
        state: what came before all keys, or None.
        return_state: whether to return the state after the last token.
        by_scores: whether queries attend to the earlier keys, or those are folded; None: what takes fewer operations.
        run: the rest of an ordinary call, behind a state.
    """
    queries, earlier = sequence.q.shape[1], sequence.k.shape[1] - sequence.q.shape[1]
    # All that is computed of a query before its score is little beside one.
    whole = replace(sequence, q=pad(sequence.q, (0, 0, 0, 0, earlier, 0)))
    if by_scores is None:
        features = symmetric_dim(sequence.key_dim, sequence.power) * (sequence.value_dim + 1)
        scores = sequence.group * queries * earlier * (sequence.key_dim + sequence.value_dim + 1)
        by_scores = scores <= (earlier + sequence.group * queries) * features
    if by_scores and queries:
        return _attend(whole, queries, state, return_state)
    return run(whole[earlier:], _fold(whole[:earlier], state))


def _attend(sequence: Sequence, queries: int, state: State | None, return_state: bool) -> tuple[Tensor, State | None]:
    power = sequence.power
    carry = enter(sequence, state)
    tokens = prepare(sequence, carry.phase, carry.exponent)
    past, own = slice(0, sequence.length - queries), slice(sequence.length - queries, None)
    q, k, v, decay = tokens.q[:, :, :, own], tokens.k, tokens.v, tokens.decay
    parts = [
        causal_attention(q, k[:, :, own], v[:, :, own], decay[:, :, own], power),
        attend_to_past(q, k[:, :, past], v[:, :, past], decay[:, :, own], decay[:, :, past], power),
    ]
    if carry.kv is not None and carry.normalizer is not None:
        parts.append(query_state(q, decay[:, :, own], carry.kv, carry.normalizer, power))
    numerator, denominator = parts[0]
    for more, weights in parts[1:]:
        numerator, denominator = numerator + more, denominator + weights
    y = divide(numerator, denominator, sequence.q.dtype)
    if not return_state:
        return y, None
    kv, normalizer = update_state(k, v, decay, carry.kv, carry.normalizer, power, in_place=False)
    return y, leave(sequence, Carry(tokens.exponent, kv, normalizer, tokens.phase), in_place=False)


def _fold(sequence: Sequence, state: State | None) -> State:
    """The state after keys and values that nobody asks for."""
    carry = enter(sequence, state)
    tokens = prepare(sequence, carry.phase, carry.exponent)
    kv, normalizer = update_state(
        tokens.k, tokens.v, tokens.decay, carry.kv, carry.normalizer, sequence.power, in_place=False
    )
    return leave(sequence, Carry(tokens.exponent, kv, normalizer, tokens.phase), in_place=False)
