"""The attention and chunked forms in plain PyTorch: one loop over chunks, of which the attention form needs one.

For each chunk
1. tokens attend to the chunk's own keys by scores, quadratic in the chunk;
2. they query the state that earlier chunks left, for what lies further back;
3. the two contributions are added and divided by their sum of weights;
4. the chunk's keys and values are folded into the state.
Without gradients nothing grows with the length but the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.blocks import causal_attention, query_state, update_state
from sympow.ops.carry import Carry, enter, leave
from sympow.ops.sequence import Sequence, divide, prepare
from sympow.ops.state import State
from sympow.ops.stretches import stretches


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
