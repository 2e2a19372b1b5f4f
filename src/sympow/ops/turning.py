"""Queries and keys turned by the accumulated phase, by a kernel where there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.backend import triton_available, triton_interpreted
from sympow.ops.rotary import accumulate_phase, last_phase, phase_after, rotate
from sympow.ops.sequence import Sequence


def turn(sequence: Sequence, start: Tensor | None, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k, and the phase after the last token (None without rotation).

    Args:
        sequence: with theta or without.
        start: the phase before the first token, (b, h_kv, d/2); None: zero.
        backend: "torch": no kernel.
    """
    if sequence.theta is None:
        return sequence.q, sequence.k, None
    if backend != "torch" and _kernel_serves(sequence.q):
        from sympow.kernels.rotation_op import fused_rotation

        q, k = fused_rotation(sequence.q, sequence.k, sequence.beta, sequence.theta, start)
        phase = phase_after(sequence.theta, sequence.beta, start, sequence.length, sequence.batch, sequence.key_heads)
        return q, k, phase
    angles = accumulate_phase(sequence.theta, sequence.beta, start, length=sequence.length)
    grouped = sequence.q.unflatten(2, (sequence.key_heads, sequence.group))
    q, k = rotate(grouped, angles.unsqueeze(3)).flatten(2, 3), rotate(sequence.k, angles)
    return q, k, last_phase(angles, start, sequence.batch, sequence.key_heads)


def _kernel_serves(q: Tensor) -> bool:
    """The kernel is for bfloat16 on a GPU. Elsewhere, and for no tokens, plain PyTorch does."""
    if q.shape[1] == 0 or triton_interpreted():
        return False
    return q.is_cuda and q.dtype == torch.bfloat16 and triton_available()
