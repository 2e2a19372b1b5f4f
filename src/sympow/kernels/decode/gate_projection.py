"""log γ and β of one token from a layer's input: the projections and activations of gates and rotations in one launch.

    log γ = log σ(W_γ x + b)        β = 1 + tanh(W_β x)        (paper §3.1 and §3.2)

PyTorch takes nine launches for this, which count in a decoding step of some microseconds. Sums are float32, and the
functions float64: near γ = 1, log γ is a small difference. `sympow.kernels.decode.reference.step_gates_reference` is
the plain PyTorch reference.
"""

# No `from __future__ import annotations`: the schema is read off the annotations.

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import split_program_id
from sympow.kernels.launch import ceil_div, flat_grid, launch
from sympow.kernels.operator import operator

BLOCK_OUTPUTS = 16
BLOCK_INPUTS = 256
WARPS = 4


@triton.jit
def _project(x_ptr, weight_ptr, block, inputs, outputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Indices and values of a block of outputs W x of one row."""
    at = block * OUTPUTS + tl.arange(0, OUTPUTS)
    known = at < outputs
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in tl.range(0, inputs, INPUTS):
        entries = start + tl.arange(0, INPUTS)
        inside = entries < inputs
        x = tl.load(x_ptr + entries, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at[:, None] * inputs + entries[None, :],
                         mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)  # fmt: skip
        sums += weight * x[None, :]
    return at, tl.sum(sums, axis=1)


@triton.jit
def step_gates_kernel(
    x_ptr, gate_weight_ptr, gate_bias_ptr, log_gamma_ptr, rotation_weight_ptr, beta_ptr, inputs, gates, rotations,
    GATED: tl.constexpr, ROTATED: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """CTA (block of outputs, row): first the blocks of the gates, then those of the rotations."""
    gate_blocks = tl.cdiv(gates, OUTPUTS)
    block, row = split_program_id(gate_blocks + tl.cdiv(rotations, OUTPUTS))
    x_ptr += row * inputs
    if GATED:
        if block < gate_blocks:
            at, logit = _project(x_ptr, gate_weight_ptr, block, inputs, gates, OUTPUTS, INPUTS)
            logit = logit.to(tl.float64) + tl.load(gate_bias_ptr + at, mask=at < gates, other=0.0).to(tl.float64)
            tail = tl.exp(-tl.abs(logit))
            # Below 1e-8, log(1 + tail) equals tail in float32, while 1 + tail loses digits of tail.
            log_gamma = tl.minimum(logit, 0.0) - tl.where(tail < 1e-8, tail, tl.log(1 + tail))
            tl.store(log_gamma_ptr + row * gates + at, log_gamma.to(tl.float32), mask=at < gates)
    if ROTATED:
        if block >= gate_blocks:
            at, product = _project(
                x_ptr, rotation_weight_ptr, block - gate_blocks, inputs, rotations, OUTPUTS, INPUTS
            )  # fmt: skip
            # 1 + tanh t = 2 σ(2 t), without the rounding of the sum.
            beta = 2 / (1 + tl.exp(-2 * product.to(tl.float64)))
            tl.store(beta_ptr + row * rotations + at, beta.to(tl.float32), mask=at < rotations)


@operator("sympow::step_gates")
def step_gates(
    x: Tensor, gate_weight: Tensor | None, gate_bias: Tensor | None, rotation_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """log γ (n, gates) and β (n, rotations), float32, of rows x (n, inputs); empty where there are no weights.

    Args:
        x: contiguous, as all others.
        gate_weight, gate_bias: (gates, inputs) and (gates,), both or neither.
        rotation_weight: (rotations, inputs).
    """
    rows, inputs = x.shape
    gates, rotations = (0 if weight is None else len(weight) for weight in (gate_weight, rotation_weight))
    log_gamma, beta = (x.new_empty(rows, outputs, dtype=torch.float32) for outputs in (gates, rotations))
    blocks = ceil_div(gates, BLOCK_OUTPUTS) + ceil_div(rotations, BLOCK_OUTPUTS)
    launch(
        step_gates_kernel, flat_grid(blocks, rows),
        x, gate_weight, gate_bias, log_gamma, rotation_weight, beta, inputs, gates, rotations,
        GATED=gates > 0, ROTATED=rotations > 0, OUTPUTS=BLOCK_OUTPUTS, INPUTS=BLOCK_INPUTS, num_warps=WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return log_gamma, beta


@step_gates.register_fake
def _(
    x: Tensor, gate_weight: Tensor | None, gate_bias: Tensor | None, rotation_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    gates, rotations = (0 if weight is None else weight.shape[0] for weight in (gate_weight, rotation_weight))
    log_gamma, beta = (x.new_empty(x.shape[0], outputs, dtype=torch.float32) for outputs in (gates, rotations))
    return log_gamma, beta
