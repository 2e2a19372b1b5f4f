"""x Wᵀ + b in float32 for a few rows of x and a few outputs, as gates and rotations need it when decoding.

One launch, where converting x and W and multiplying them takes four; in a step that runs in microseconds it counts.
"""

# No `from __future__ import annotations`: the schema is read off the annotations.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_OUTPUTS = 16
BLOCK_INPUTS = 256
WARPS = 4


@triton.jit
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, inputs, outputs, x_row, weight_row,
    BIAS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (row, block of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = at < outputs
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in tl.range(0, inputs, INPUTS):
        entries = start + tl.arange(0, INPUTS)
        inside = entries < inputs
        x = tl.load(x_ptr + row * x_row + entries, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at[:, None] * weight_row + entries[None, :],
                         mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)  # fmt: skip
        sums += weight * x[None, :]
    y = tl.sum(sums, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + at, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * outputs + at, y, mask=known)


@torch.library.custom_op("sympow::few_rows_linear", mutates_args=())
def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(n, inputs), (outputs, inputs) and (outputs,) to (n, outputs) float32; last axes contiguous."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = x.new_empty(rows, outputs, dtype=torch.float32)
    few_rows_kernel[(rows, triton.cdiv(outputs, BLOCK_OUTPUTS))](
        x, weight, bias, y, inputs, outputs, x.stride(0), weight.stride(0),
        BIAS=bias is not None, OUTPUTS=BLOCK_OUTPUTS, INPUTS=BLOCK_INPUTS, num_warps=WARPS,
    )  # fmt: skip
    return y


@few_rows_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
