"""A state with all products of entries of the keys, p = 2, as the chunked kernels hold it.

`State` holds the D = d(d + 1)/2 symmetric features. The kernels multiply whole rows of keys, so that each product of
two different entries is there twice, as x_i x_a and as x_a x_i.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class FullState(NamedTuple):
    """One state with all d² features: kv (b, h_kv, d, e, d), as (i, value, a), and normalizer (b, h_kv, d, d)."""

    kv: Tensor
    normalizer: Tensor


def to_full(kv: Tensor, normalizer: Tensor, key_dim: int, dim: int) -> FullState:
    """S (b, h, D, e) and Z (b, h, D) as a full state, keys and values padded with zeros to `dim` entries."""
    first, second = torch.triu_indices(key_dim, key_dim, device=kv.device).unbind()
    number = torch.zeros(key_dim, key_dim, dtype=torch.long, device=kv.device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=kv.device)
    scale = torch.full((key_dim, key_dim), math.sqrt(0.5), device=kv.device).fill_diagonal_(1.0)
    beyond = dim - key_dim
    full = (kv[:, :, number] * scale.unsqueeze(-1)).transpose(-1, -2)
    full = pad(full, (0, beyond, 0, dim - kv.shape[-1], 0, beyond))
    normalizer = pad(normalizer[:, :, number] * scale, (0, beyond, 0, beyond))
    return FullState(full.contiguous(), normalizer.contiguous())


def from_full(kv: Tensor, normalizer: Tensor, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `to_full`: S (b, h, D, e) and Z (b, h, D)."""
    first, second = torch.triu_indices(key_dim, key_dim, device=kv.device).unbind()
    # The mean of both places, so that gradients are as symmetric as the kernels expect them to be.
    scale = torch.where(first == second, 0.5, math.sqrt(0.5))
    features_last = kv[:, :, :, :value_dim].transpose(-1, -2)
    both = features_last[:, :, first, second] + features_last[:, :, second, first]
    both_normalizers = normalizer[:, :, first, second] + normalizer[:, :, second, first]
    return both * scale.unsqueeze(-1), both_normalizers * scale
