"""The rotation of a sequence's queries and keys, by a kernel where one supports it."""

from __future__ import annotations

from torch import Tensor

from sympow.ops.dispatch import rotation_unsupported_reason
from sympow.ops.rotary import accumulate_phase, last_phase, phase_after, rotate
from sympow.ops.sequence import Sequence


def rotate_sequence(
    sequence: Sequence, start: Tensor | None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rotated q and k, and the phase after the last token (None without rotation).

    Args:
        start: the phase before the first token, (b, h_kv, d/2); None: zero.
        backend: as in `sympow.attention`.
    """
    if sequence.theta is None:
        return sequence.q, sequence.k, None
    if backend != "torch" and rotation_unsupported_reason(sequence.q) is None:
        from sympow.kernels.rotary import fused_rotation

        q, k = fused_rotation(sequence.q, sequence.k, sequence.beta, sequence.theta, start)
        phase = phase_after(sequence.theta, sequence.beta, start, sequence.length, sequence.batch, sequence.key_heads)
        return q, k, phase
    angles = accumulate_phase(sequence.theta, sequence.beta, start, length=sequence.length)
    grouped = sequence.q.unflatten(2, (sequence.key_heads, sequence.group))
    q, k = rotate(grouped, angles.unsqueeze(3)).flatten(2, 3), rotate(sequence.k, angles)
    return q, k, last_phase(angles, start, sequence.batch, sequence.key_heads)
