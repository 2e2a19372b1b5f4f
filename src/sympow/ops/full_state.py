"""Between states of the D symmetric features and states of all d² products, which the chunked kernels compute with.

For p = 2 a feature is √2 x_i x_a (i < a) or x_i². The kernels keep x_i x_a for every i and a, so that a product of
matrices runs over them; φ(q) S is the same number either way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.symmetric import feature_indices


def to_full(kv: Tensor, normalizer: Tensor, key_dim: int, dim: int) -> tuple[Tensor, Tensor]:
    """S (b, h, D, e) and Z (b, h, D) → (b, h, dim, dim, dim) as (i, value, a), and (b, h, dim, dim), zero beyond."""
    first, second = _pairs(key_dim, kv.device)
    number = torch.zeros(key_dim, key_dim, dtype=torch.long, device=kv.device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=kv.device)
    scale = torch.full((key_dim, key_dim), math.sqrt(0.5), device=kv.device).fill_diagonal_(1.0)
    beyond = dim - key_dim
    full = (kv[:, :, number] * scale.unsqueeze(-1)).transpose(-1, -2)
    full = pad(full, (0, beyond, 0, dim - kv.shape[-1], 0, beyond))
    return full.contiguous(), pad(normalizer[:, :, number] * scale, (0, beyond, 0, beyond)).contiguous()


def from_full(kv: Tensor, normalizer: Tensor, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `to_full`: S (b, h, D, e) and Z (b, h, D)."""
    first, second = _pairs(key_dim, kv.device)
    # The mean of both places, so that gradients are as symmetric as the kernels expect them to be.
    scale = torch.where(first == second, 0.5, math.sqrt(0.5))
    features_last = kv[:, :, :, :value_dim].transpose(-1, -2)
    both = features_last[:, :, first, second] + features_last[:, :, second, first]
    both_normalizers = normalizer[:, :, first, second] + normalizer[:, :, second, first]
    return both * scale.unsqueeze(-1), both_normalizers * scale


def _pairs(key_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = feature_indices(key_dim, 2, device).long().unbind(1)
    return first, second
