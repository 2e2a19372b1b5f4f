"""Plain PyTorch references of the kernels that are one module each: running sums, drift, rotation, cross-entropy.

Each is the definition written out, in the dtype of its inputs, shares no code with its kernel, and needs no Triton. The
references of `attention`, `states` and `decode` are in the `reference.py` of each folder; `hopper` has those of
`attention`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def running_sum_reference(x: Tensor, *, reverse: bool = False) -> Tensor:
    """Twin of `running_sums.running_sum`: (b, t, c) → (b, c, t) float64."""
    x = x.double().transpose(1, 2)
    return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)


def correct_drift_reference(
    suffix_sums: Tensor, exact: Tensor | None, spacing: int, document_end: Tensor | None = None
) -> Tensor:
    """Twin of `running_sums.correct_drift`: (b, h, t) → (b, t, h), token by token."""
    length = suffix_sums.shape[-1]
    known = [*range(0, length, spacing), length]
    at_known = torch.cat([suffix_sums, suffix_sums.new_zeros(*suffix_sums.shape[:2], 1)], dim=-1)[..., known]
    drift = (0 if exact is None else exact) - at_known
    corrected = []
    for position in range(length):
        before = position // spacing
        fraction = (position - known[before]) / (known[before + 1] - known[before])
        correction = (1 - fraction) * drift[..., before] + fraction * drift[..., before + 1]
        corrected.append(suffix_sums[..., position] + correction)
    out = torch.stack([*corrected, torch.zeros_like(suffix_sums[..., 0])], dim=1)
    return out[:, :length] if document_end is None else out[:, :length] - out[:, document_end.long()]


def rotation_reference(
    q: Tensor,
    k: Tensor,
    beta: Tensor | None,
    theta: Tensor,
    start: Tensor | None = None,
    document_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of `rotary.fused_rotation`: q and k with each pair of entries rotated by μ_i = μ_0 + Σ_{j≤i} β_j θ.

    Args:
        q, k: (b, t, h, d), (b, t, h_kv, d).
        beta: (b, t, h_kv) or (b, t, h_kv, d/2); None: 1.
        theta: (d/2,).
        start: μ_0, (b, h_kv, d/2); None: 0.
        document_start: the first position of each token's document, (t,); None: one document.
    """
    batch, length, heads, _ = k.shape
    scales = k.new_ones(batch, length, heads, 1, dtype=torch.float64)
    if beta is not None:
        scales = (beta if beta.ndim == 4 else beta.unsqueeze(-1)).double()
    steps = scales * theta.double()
    phase = steps.cumsum(1)
    if document_start is not None:
        before = torch.cat([torch.zeros_like(phase[:, :1]), phase], dim=1)
        phase = phase - before[:, document_start.long()]
    if start is not None:
        phase = phase + start.unsqueeze(1)
    return rotate_pairs(q, phase.repeat_interleave(q.shape[2] // heads, dim=2)), rotate_pairs(k, phase)


def rotate_pairs(x: Tensor, phase: Tensor) -> Tensor:
    """x (…, d) with each pair of entries rotated by its angle in phase (…, d/2)."""
    cos, sin = (phase % (2 * math.pi)).cos().to(x.dtype), (phase % (2 * math.pi)).sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def cross_entropy_reference(logits: Tensor, targets: Tensor, vocabulary: int, scale: float) -> tuple[Tensor, Tensor]:
    """Twin of `cross_entropy.cross_entropy_in_place`: the losses (rows,), and what the logits are overwritten with."""
    log_weights = logits[:, :vocabulary].log_softmax(-1)
    losses = -log_weights.gather(1, targets[:, None]).squeeze(1)
    gradient = torch.zeros_like(logits)
    gradient[:, :vocabulary] = scale * (log_weights.exp() - torch.nn.functional.one_hot(targets, vocabulary))
    return losses, gradient
