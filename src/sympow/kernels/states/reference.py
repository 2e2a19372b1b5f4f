"""Plain PyTorch references of the kernels of chunk states and of the messages that carry states between ranks.

They share no code with the kernels and need no Triton.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chunk_states_reference(k: Tensor, v: Tensor, log_gamma: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Twin of `quadratic.chunk_sums` and `scan_sums`: S and Z at the boundaries between chunks, with all d² features.

    S_ia = Σ_{j<R} exp(G_R − G_j) k_i k_a v_j and Z_ia = Σ_{j<R} exp(G_R − G_j) k_i k_a at boundary R.

    Args:
        k, v: (b, t, h, d), (b, t, h, e).
        log_gamma: (b, t, h); None: no gates.

    Returns:
        S (b, h, boundaries, d, e, d) and Z (b, h, boundaries, d, d).
    """
    length, states, normalizers = k.shape[1], [], []
    for boundary in range(chunk, length, chunk):
        past_k, past_v = k[:, :boundary], v[:, :boundary]
        decay = torch.ones_like(past_k[..., 0])
        if log_gamma is not None:
            sums = log_gamma[:, :boundary].double().clamp(min=-110.0).cumsum(1)
            decay = (sums[:, -1:] - sums).exp().to(k.dtype)
        states.append(torch.einsum("bjh,bjhi,bjha,bjhe->bhiea", decay, past_k, past_k, past_v))
        normalizers.append(torch.einsum("bjh,bjhi,bjha->bhia", decay, past_k, past_k))
    return torch.stack(states, dim=2), torch.stack(normalizers, dim=2)


def past_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, power: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Twin of `quartic_op.past_attention`: Σ_j B_ij v_j (b, t, h, e) and Σ_j B_ij (b, h, t) over the keys j of earlier
    chunks than i's, as whole matrices in the dtype of the inputs."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) ** power
    if log_gamma is not None:
        sums = log_gamma.double().clamp(min=-110).cumsum(1).repeat_interleave(group, 2).transpose(1, 2)
        scores = scores * (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().to(scores.dtype)
    chunks = torch.arange(q.shape[1], device=q.device) // chunk
    scores = scores * (chunks[:, None] > chunks[None, :])
    return torch.einsum("bhij,bjhe->bihe", scores, v), scores.sum(-1)


def pack_reference(kv: Tensor, normalizer: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Twin of `message_packing.pack`: S (b, h, D, e), Z (b, h, D) and the bits of log_decay (b, h) float64, in one
    axis.

    Feature (i, a), i ≤ a, is x_i² or √2 x_i x_a; a full state has both x_i x_a and x_a x_i, whose mean counts.

    Args:
        kv, normalizer: a full state, (b, h, d, e, d) and (b, h, d, d) float32.
        log_decay: logarithm of the square root of the decay; None: the message has none.
    """
    i, a, scale = _features(kv.shape[2], kv)
    features = (kv[:, :, i, :, a] + kv[:, :, a, :, i]).permute(1, 2, 0, 3) * (scale / 2)[:, None]
    normalizers = (normalizer[:, :, i, a] + normalizer[:, :, a, i]) * (scale / 2)
    parts = [features.flatten(), normalizers.flatten()]
    if log_decay is not None:
        parts.append(log_decay.double().contiguous().view(torch.float32).flatten())
    return torch.cat(parts)


def unpack_reference(message: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reference of `message_packing.unpack` for one message, inverse of `pack_reference`: kv, normalizer, log_decay.

    Args:
        shape: b, h, d and e.
    """
    batch, heads, dim, value_dim = shape
    i, a, scale = _features(dim, message)
    count = batch * heads * len(i)
    features, normalizers, rest = message.split([count * value_dim, count, len(message) - count * (value_dim + 1)])
    features = features.view(batch, heads, len(i), value_dim) / scale[:, None]
    normalizers = normalizers.view(batch, heads, len(i)) / scale
    kv = message.new_zeros(batch, heads, dim, value_dim, dim)
    normalizer = message.new_zeros(batch, heads, dim, dim)
    for row, column in ((i, a), (a, i)):
        kv[:, :, row, :, column] = features.permute(2, 0, 1, 3)
        normalizer[:, :, row, column] = normalizers
    return kv, normalizer, rest.clone().view(torch.float64).view(batch, heads) if len(rest) else None


def _features(dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entries i ≤ a of each feature of degree 2, and its scale in the dtype of `like`."""
    i, a = torch.triu_indices(dim, dim, device=like.device)
    return i, a, torch.where(i == a, like.new_tensor(1.0), like.new_tensor(math.sqrt(2.0)))
