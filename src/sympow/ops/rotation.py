"""The rotation of a sequence's queries and keys, by a kernel where one supports it."""

from __future__ import annotations

from torch import Tensor

from sympow.ops.dispatch import rotation_unsupported_reason
from sympow.ops.inputs import Inputs
from sympow.ops.rotary import accumulate_phase, last_phase, phase_after, rotate


def rotate_inputs(
    inputs: Inputs, start: Tensor | None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rotated q and k, and the phase after the last token (None without rotation).

    Args:
        start: the phase before the first token, (b, h_kv, d/2); None: zero.
        backend: as in `sympow.attention`.
    """
    if inputs.theta is None:
        return inputs.q, inputs.k, None
    if backend != "torch" and rotation_unsupported_reason(inputs.q) is None:
        from sympow.kernels.rotary import fused_rotation

        q, k = fused_rotation(inputs.q, inputs.k, inputs.beta, inputs.theta, start)
        phase = phase_after(inputs.theta, inputs.beta, start, inputs.length, inputs.batch, inputs.key_heads)
        return q, k, phase
    angles = accumulate_phase(inputs.theta, inputs.beta, start, length=inputs.length)
    grouped = inputs.q.unflatten(2, (inputs.key_heads, inputs.group))
    q, k = rotate(grouped, angles.unsqueeze(3)).flatten(2, 3), rotate(inputs.k, angles)
    return q, k, last_phase(angles, start, inputs.batch, inputs.key_heads)
