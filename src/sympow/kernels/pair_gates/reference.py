"""Plain PyTorch reference of the kernels for a gate per rotated pair, with whole matrices, from the paper's equations.

It shares no code with the kernels and needs no Triton. It is that of both forms, which compute the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pair_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, power: int, *, document_start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij, (b, t, h, e), and the denominators Σ_{j≤i} B_ij, (b, h, t).

    B_ij = (Σ_m exp((G_im − G_jm)/p) (q_i · k_j)_m)^p over the pairs m of entries, with G the running sum of log γ
    (paper §5, "vector gating", rotations already applied). y_i is 0 where the weight is 0.

    Args:
        q, k, v: (b, t, h, d), (b, t, h_kv, d), (b, t, h_kv, e); query head i reads key head i // (h / h_kv).
        log_gamma: (b, t, h_kv, d/2); −inf closes a gate.
        power: p.
        document_start: the first position of each token's document, (t,); None: one document.
    """
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v, log_gamma = (x.repeat_interleave(group, dim=2) for x in (k, v, log_gamma))
    position = torch.arange(length, device=q.device)
    visible = position[:, None] >= position[None, :]
    if document_start is not None:
        visible &= document_start[:, None] <= position[None, :]
    # Clamped to finite values, so that differences are defined; exp(−800) is 0 in float64.
    sums = (log_gamma.double() / power).clamp(min=-800.0).cumsum(1)
    scores = torch.zeros(q.shape[0], q.shape[2], length, length, dtype=q.dtype, device=q.device)
    for pair in range(q.shape[-1] // 2):
        both = slice(2 * pair, 2 * pair + 2)
        product = torch.einsum("bihd,bjhd->bhij", q[..., both], k[..., both])
        along = sums[..., pair].transpose(1, 2)
        decay = (along.unsqueeze(-1) - along.unsqueeze(-2)).masked_fill(~visible, -torch.inf).exp()
        scores = scores + product * decay.to(q.dtype)
    scores = scores.masked_fill(~visible, 0.0) ** power
    denominator = scores.sum(-1)
    y = torch.einsum("bhij,bjhe->bihe", scores, v)
    return y / torch.where(denominator == 0, 1, denominator).transpose(1, 2).unsqueeze(-1), denominator
