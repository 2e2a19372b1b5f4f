"""Plain PyTorch reference of the attention kernels, portable and Hopper: whole matrices, from the paper's equations.

It shares no code with the kernels and needs no Triton. The chunked form has the same reference: it computes the same
numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    power: int,
    *,
    chunk: int = 0,
    document_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij, (b, t, h, e), and the denominators Σ_{j≤i} B_ij, (b, h, t).

    B_ij = exp(G_i − G_j) (q_i · k_j)^p with G the running sum of log γ (paper §3.1, rotations already applied). A row
    without weight gives 0.

    Args:
        q, k, v: (b, t, h, d), (b, t, h_kv, d), (b, t, h_kv, e); query head i reads key head i // (h / h_kv).
        log_gamma: (b, t, h_kv); None: no gates.
        power: p.
        chunk: tokens per chunk, which sees no earlier one; 0: all in one.
        document_start: the first position of each token's document, (t,); None: one document.
    """
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    position = torch.arange(length, device=q.device)
    visible = position[:, None] >= position[None, :]
    if chunk:
        visible &= position[:, None] // chunk == position[None, :] // chunk
    if document_start is not None:
        visible &= document_start[:, None] <= position[None, :]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) ** power
    if log_gamma is not None:
        scores = scores * decays_reference(log_gamma, visible).repeat_interleave(group, dim=1).to(scores.dtype)
    scores = scores.masked_fill(~visible, 0.0)
    denominator = scores.sum(-1)
    y = torch.einsum("bhij,bjhe->bihe", scores, v)
    return y / torch.where(denominator == 0, 1, denominator).transpose(1, 2).unsqueeze(-1), denominator


def decays_reference(log_gamma: Tensor, visible: Tensor) -> Tensor:
    """b_ij = exp(G_i − G_j) where `visible` (t, t), 0 elsewhere: (b, h_kv, t, t) float64. Gates may be closed."""
    # Finite, so that differences are defined; exp(−800) is 0 in float64.
    sums = log_gamma.double().clamp(min=-800.0).cumsum(1).transpose(1, 2)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~visible, -torch.inf).exp()
