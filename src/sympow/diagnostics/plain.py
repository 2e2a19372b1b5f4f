"""The operator as one would write it in PyTorch from the paper's equations: whole matrices, in the dtype of q.

In float64 it is what kernels are compared with. In the kernels' own dtype its error says how much of an error is due to
rounding. It shares no code with `sympow.ops`, so that it cannot inherit a mistake.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int | None,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> Tensor:
    """Y_i = Σ_j B_ij V_j / Σ_j B_ij with B_ij = b_ij (R(c_ij θ) Q_i · K_j)^p (paper §3.3).

    Args:
        q, k, v, log_gamma, beta, theta: as in `sympow.attention`, with one gate per head.
        power: p; None: softmax, B_ij = b_ij exp(Q_i · K_j / √d).
        documents: lengths of packed documents; None: one document.
    """
    if documents is not None:
        inputs = {"q": q, "k": k, "v": v, "log_gamma": log_gamma, "beta": beta}
        given = {name: x for name, x in inputs.items() if x is not None}
        parts: list[dict[str, Any]] = [
            {name: x[:, start:stop] for name, x in given.items()}
            for start, stop in itertools.pairwise((0, *itertools.accumulate(documents)))
        ]
        return torch.cat([plain_attention(**part, power=power, theta=theta) for part in parts], dim=1)
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    if theta is not None:
        # One phase per key head and pair: (b, t, h, d/2). In float64, since it grows with the length.
        scales = torch.ones_like(k[..., :1], dtype=torch.float64)
        if beta is not None:
            scales = (beta if beta.ndim == 4 else beta.unsqueeze(-1)).double().repeat_interleave(group, dim=2)
        phase = (scales * theta.double()).cumsum(1) % (2 * torch.pi)
        q, k = _rotated(q, phase), _rotated(k, phase)
    products = torch.einsum("bihd,bjhd->bhij", q, k)
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    log_decay = torch.zeros_like(products, dtype=torch.float64)
    if log_gamma is not None:
        sums = log_gamma.double().cumsum(1).transpose(1, 2).repeat_interleave(group, dim=1)
        log_decay = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    log_decay = log_decay.masked_fill(~causal, -torch.inf)
    if power is None:
        weights = (products / q.shape[-1] ** 0.5 + log_decay.to(q.dtype)).softmax(-1)
    else:
        scores = products**power * log_decay.exp().to(q.dtype)
        weights = scores / scores.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhe->bihe", weights, v)


def plain_gates(x: Tensor, gate_weight: Tensor, gate_bias: Tensor, rotation_weight: Tensor) -> tuple[Tensor, Tensor]:
    """log γ = log σ(W_γ x + b) and β = 1 + tanh(W_β x) (paper §3.1 and §3.2) of rows x (n, width)."""
    return logsigmoid(x @ gate_weight.mT + gate_bias), 1 + torch.tanh(x @ rotation_weight.mT)


def _rotated(x: Tensor, phase: Tensor) -> Tensor:
    """Each pair of entries of x (b, t, h, d) turned by its angle in phase (b, t, h, d/2)."""
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
