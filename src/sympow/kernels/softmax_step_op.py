"""A step of softmax attention with a cache as a PyTorch operator, which changes the cache's tensors in place."""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.common import rows_contiguous
from sympow.kernels.softmax_step import softmax_step


@torch.library.custom_op(
    "sympow::softmax_step",
    mutates_args=("keys", "values", "sums", "count", "phase", "arrivals", "workspace"),
)
def fused_softmax_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    keys: Tensor,
    values: Tensor,
    sums: Tensor | None,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
) -> Tensor:
    """y (b, h, e); arguments as in `softmax_step`, of any strides where they are not changed."""
    return softmax_step(
        rows_contiguous(q),
        rows_contiguous(k),
        rows_contiguous(v),
        None if log_gamma is None else log_gamma.contiguous(),
        None if beta is None else beta.contiguous(),
        None if theta is None else theta.contiguous(),
        keys,
        values,
        sums,
        count,
        phase,
        arrivals,
        workspace,
    )


@fused_softmax_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    keys: Tensor,
    values: Tensor,
    sums: Tensor | None,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])
