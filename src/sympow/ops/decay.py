"""Running sums of log gates, and the decays between two positions that they give (paper §3.1).

b_ij = ∏_{k=j+1..i} γ_k = exp(G_i − G_j), with G the running sum of log γ. It is always split at a position r between
j and i, exp(G_i − G_r) · exp(G_r − G_j), so that no large positive number is ever exponentiated. The p-th root of
either factor is applied to a query or a key rather than the whole to a score: that way one rule serves the scalar gate
and the gate per rotated pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.symmetric import monomial_rows

# So closed that γ = 0, while differences of running sums stay finite (log γ = −inf would give inf − inf): between the
# longest and the shortest key of float64 lie 2^2098, and exp(−2500) times that is still 0.
CLOSED_GATE_LOG_ROOT = -2500.0


def log_gate_root(log_gamma: Tensor, power: int) -> Tensor:
    """log γ^(1/p) in float64, finite even for γ = 0: (b, t, h_kv[, d/2]) → (b, h_kv, t, 1 or d/2)."""
    per_pair = log_gamma if log_gamma.ndim == 4 else log_gamma.unsqueeze(-1)
    return (per_pair.to(torch.float64) / power).clamp(min=CLOSED_GATE_LOG_ROOT).transpose(1, 2)


def apply_decay(x: Tensor, log_root: Tensor) -> Tensor:
    """Scales x (..., t, d) by exp(log_root): one factor per row (..., t, 1), or per pair of entries (..., t, d/2)."""
    factor = log_root.to(x.dtype).exp()
    if factor.shape[-1] == 1:
        return x * factor
    return (x.unflatten(-1, (-1, 2)) * factor.unsqueeze(-1)).flatten(-2)


def feature_decay(log_root: Tensor, power: int, dtype: torch.dtype) -> Tensor:
    """What a decay of the keys does to their features: (..., 1 or d/2) → (..., 1 or D).

    The diagonal of P̄ for P = diag(exp(log_root)), each pair sharing a factor: scaling keys by P scales a state by it.
    """
    if log_root.shape[-1] == 1:
        return (log_root * power).exp().to(dtype)
    return monomial_rows(log_root.exp().repeat_interleave(2, dim=-1).mT, power).mT.to(dtype)
