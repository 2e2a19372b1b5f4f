"""Steps and folds of a window as PyTorch operators, which change the window's tensors in place."""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.common import rows_contiguous
from sympow.kernels.window import window_fold, window_step


@torch.library.custom_op(
    "sympow::window_step",
    mutates_args=("keys", "values", "sums", "count", "phase", "arrivals", "workspace"),
)
def fused_window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    power: int,
) -> Tensor:
    """y (b, h, e); arguments as in `window_step`, of any strides where they are not changed."""
    return window_step(
        rows_contiguous(q),
        rows_contiguous(k),
        rows_contiguous(v),
        None if log_gamma is None else log_gamma.contiguous(),
        None if beta is None else beta.contiguous(),
        None if theta is None else theta.contiguous(),
        kv,
        normalizer,
        keys,
        values,
        sums,
        count,
        phase,
        arrivals,
        workspace.flatten(),
        index,
        weight,
        power,
    )


@fused_window_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    power: int,
) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("sympow::window_fold", mutates_args=("kv", "normalizer", "count", "arrivals"))
def fused_fold(
    kv: Tensor,
    normalizer: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    count: Tensor,
    arrivals: Tensor,
    index: Tensor,
    weight: Tensor,
) -> None:
    """Arguments as in `window_fold`."""
    window_fold(kv, normalizer, keys, values, sums, count, arrivals, index, weight)


@fused_fold.register_fake
def _(
    kv: Tensor,
    normalizer: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    count: Tensor,
    arrivals: Tensor,
    index: Tensor,
    weight: Tensor,
) -> None:
    return None
