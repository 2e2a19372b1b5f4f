"""The state that tokens leave, without their outputs (paper eq. conformal_in_practice)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sympow.ops.blocks import update_state
from sympow.ops.carry import Carry, enter, leave
from sympow.ops.sequence import Sequence, prepare
from sympow.ops.state import State


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
