"""The recurrent form in plain PyTorch: the paper's update, one token at a time (eq. conformal_in_practice).

Without gradients the state is one buffer, updated in place. With gradients every step's state is kept, t · D · e
numbers: for training use the chunked form, which gives the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.blocks import drop_rounding, multiply
from sympow.ops.carry import Carry, enter, leave
from sympow.ops.decay import feature_decay
from sympow.ops.sequence import Sequence, divide, prepare
from sympow.ops.state import State
from sympow.ops.symmetric import even_power, symmetric_dim, symmetric_power


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
