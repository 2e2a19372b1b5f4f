"""One token from a state as a PyTorch operator. Where something is missing, an empty tensor stands for it."""


# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.common import rows_contiguous

# No `from __future__ import annotations`: the schemas are read off the annotations.
from sympow.kernels.decode.softmax_step import softmax_step
from sympow.kernels.decode.state_step import decode_step

# No `from __future__ import annotations`: the schemas are read off the annotations.
from sympow.kernels.decode.window_step import window_fold, window_step


@torch.library.custom_op("sympow::decode", mutates_args=())
def fused_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor,
    normalizer: Tensor,
    phase: Tensor | None,
    index: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, h, e), and kv, normalizer and phase (empty without rotation) after it; shapes as in `decode_step`."""
    y, kv, normalizer, phase = decode_step(
        rows_contiguous(q),
        rows_contiguous(k),
        rows_contiguous(v),
        None if log_gamma is None else log_gamma.contiguous(),
        None if beta is None else beta.contiguous(),
        None if theta is None else theta.contiguous(),
        kv,
        normalizer,
        phase,
        index,
        weight,
    )
    return y, kv, normalizer, y.new_empty(0, dtype=torch.float64) if phase is None else phase


@fused_decode.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor,
    normalizer: Tensor,
    phase: Tensor | None,
    index: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    phase_out = y.new_empty(0, dtype=torch.float64) if phase is None else torch.empty_like(phase)
    return y, torch.empty_like(kv), torch.empty_like(normalizer), phase_out


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
