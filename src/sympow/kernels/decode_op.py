"""One token from a state as a PyTorch operator. Where something is missing, an empty tensor stands for it."""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.common import rows_contiguous
from sympow.kernels.decode import decode_step


@torch.library.custom_op("sympow::decode", mutates_args=())
def _decode(
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
    """y (b, h, e), and kv, normalizer and phase (empty without rotation) after one token."""
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


@_decode.register_fake
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One token from a state of any float dtype and strides; shapes as in `decode_step`."""
    kv, normalizer = (x.to(torch.float32).contiguous() for x in (kv, normalizer))
    phase = None if phase is None else phase.contiguous()
    y, kv, normalizer, phase_out = _decode(q, k, v, log_gamma, beta, theta, kv, normalizer, phase, index, weight)
    return y, kv, normalizer, None if phase is None else phase_out
