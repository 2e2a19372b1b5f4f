"""The recurrent form in plain PyTorch: the paper's update, one token at a time (eq. conformal_in_practice).

Without gradients the state is one buffer, updated in place. With gradients every step's state is kept, t · D · e
numbers: for training use the chunked form, which gives the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.carry import enter, leave
from sympow.ops.decay import feature_decay, log_gate_root
from sympow.ops.sequence import Sequence, divide, prepare
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_dim, symmetric_power


def recurrent_form(
    sequence: Sequence, state: State | None, return_state: bool, needs_grad: bool
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for."""
    power, dtype = sequence.power, sequence.compute_dtype
    carry = enter(sequence, state)
    tokens = prepare(sequence, carry.phase, carry.exponent)
    carry.phase = tokens.phase
    log_gates = None if sequence.log_gamma is None else log_gate_root(sequence.log_gamma, power)

    heads = (sequence.batch, sequence.key_heads, symmetric_dim(sequence.key_dim, power))
    kv = carry.kv if carry.kv is not None else tokens.v.new_zeros(*heads, sequence.value_dim)
    normalizer = carry.normalizer if carry.normalizer is not None else tokens.v.new_zeros(*heads)

    numerators, denominators = [], []
    for i in range(sequence.length):
        key = symmetric_power(tokens.k[:, :, i], power)  # (b, h_kv, D)
        query = symmetric_power(tokens.q[:, :, :, i], power)  # (b, h_kv, g, D)
        value = tokens.v[:, :, i]  # (b, h_kv, e)
        gamma = None if log_gates is None else feature_decay(log_gates[:, :, i], power, dtype)
        if needs_grad:
            if gamma is not None:
                kv, normalizer = kv * gamma.unsqueeze(-1), normalizer * gamma
            kv = kv + key.unsqueeze(-1) * value.unsqueeze(-2)
            normalizer = normalizer + key
        else:
            if gamma is not None:
                kv.mul_(gamma.unsqueeze(-1))
                normalizer.mul_(gamma)
            kv.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
            normalizer.add_(key)
        numerators.append(query @ kv)
        denominators.append((query @ normalizer.unsqueeze(-1)).squeeze(-1))

    y = divide(torch.stack(numerators, dim=3), torch.stack(denominators, dim=3), sequence.q.dtype)
    carry.kv, carry.normalizer = kv, normalizer
    return y, leave(sequence, carry) if return_state else None
