"""Gate and rotation of one token, as decoding wants them: on a GPU both in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.layers.gates import DataDependentGate, Gate
from sympow.layers.projection import FloatLinear, weights_say_all
from sympow.layers.rotations import DataDependentRotation, Rotation
from sympow.ops.backend import triton_available
from sympow.ops.operator import Backend

# Rows up to which the kernel is used: it reads all weights for each of them.
FEW_ROWS = 64


def gate_and_turn(
    x: Tensor, gate: Gate, rotation: Rotation, backend: Backend = "auto"
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """log γ, θ and β of one token of each sequence, x (b, 1, width), without gradients; None where there are none.

    Args:
        backend: "torch": no kernel. With "auto" and "triton", the kernel where it can serve.
    """
    of_gate, of_rotation = gate.projection, rotation.projection
    present = [projection for projection in (of_gate, of_rotation) if projection is not None]
    plain = [projection for projection in present if weights_say_all(projection, x.device)]
    if backend == "torch" or len(plain) < len(present) or not _kernel_serves(x, plain):
        theta, beta = rotation(x)
        return gate(x), theta, beta
    from sympow.kernels.step_gates import step_gates

    found = step_gates(
        x.flatten(0, -2).contiguous(),
        None if of_gate is None else of_gate.weight,
        None if of_gate is None else of_gate.bias,
        None if of_rotation is None else of_rotation.weight,
    )
    log_gamma, beta = (flat.unflatten(0, x.shape[:-1]) for flat in found)
    log_gamma = gate.by_heads(log_gamma) if isinstance(gate, DataDependentGate) else gate(x)
    if isinstance(rotation, DataDependentRotation):
        return log_gamma, rotation.rates(x.device), rotation.by_heads(beta)
    return log_gamma, *rotation(x)


def _kernel_serves(x: Tensor, projections: list[FloatLinear]) -> bool:
    """Whether there is something to project, x is one step's in half precision, and weights lie on this device."""
    if not (
        projections
        and x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.numel() <= FEW_ROWS * x.shape[-1]
    ):
        return False
    plain = all(type(p.weight.data) is Tensor and p.weight.dtype != torch.float64 for p in projections)
    return plain and not torch.is_grad_enabled() and triton_available()
