"""Packed documents as the kernels see them: for every token, where its document begins and ends.

Between documents gates are closed, which keeps states and scores apart; the places only save the kernels from visiting
tiles that would come out zero, and let running sums start anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """start and end (one past the last) of each token's document, (t,) int32."""

    start: Tensor
    end: Tensor


def locate(cu_seqlens: Tensor, length: int) -> Documents:
    """From the offsets (n + 1,) of documents packed into `length` tokens; without waiting for the device."""
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    after = torch.searchsorted(cu_seqlens, positions, right=True)
    return Documents(cu_seqlens[after - 1].to(torch.int32), cu_seqlens[after].to(torch.int32))


def close_gates(log_gamma: Tensor | None, documents: Documents, heads: int) -> Tensor:
    """log γ (1, t, heads) with −inf at the first token of each document, which forgets all before it."""
    first = documents.start == torch.arange(len(documents.start), device=documents.start.device)
    if log_gamma is None:
        log_gamma = first.new_zeros(1, len(first), heads, dtype=torch.float32)
    return log_gamma.masked_fill(first[:, None], -torch.inf)


def sums_to_end(suffix_sums: Tensor, end: Tensor) -> Tensor:
    """Σ over the rest of each token's own document, from sums over all later tokens (…, t)."""
    return suffix_sums - torch.nn.functional.pad(suffix_sums, (0, 1))[..., end]


def sums_from_start(prefix_sums: Tensor, start: Tensor) -> Tensor:
    """Σ over each token's own document so far, from sums over all earlier tokens (…, t)."""
    return prefix_sums - torch.nn.functional.pad(prefix_sums, (1, 0))[..., start]
