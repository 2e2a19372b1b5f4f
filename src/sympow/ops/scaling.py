"""Scales that leave the output unchanged and keep every score within range.

The output does not change when a query is scaled, nor when all keys of a head are scaled together with its state
(by s, and by s^p). So queries are brought to unit length and the keys of a call to at most unit length; then no score
exceeds 1, whatever the power. The scales are constants to autograd: for a function that does not depend on the scale
of its argument, the gradient is exact without them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unit_length(q: Tensor) -> Tensor:
    """q / |q| along the last axis, zero staying zero, with |q| constant to autograd."""
    # In two steps, since |q|² may leave the range of float32 where |q| does not.
    largest = _or_one(q.detach().abs().amax(-1, keepdim=True))
    reduced = q / largest
    return reduced / _or_one(reduced.detach().norm(dim=-1, keepdim=True))


def key_exponent(k: Tensor, normalizer: Tensor | None, power: int, dtype: torch.dtype) -> Tensor:
    """The power of two that bounds the length of every key of a head, past ones included: (b, h_kv) int.

    Args:
        k: (b, t, h_kv, d).
        normalizer: (b, h_kv, D) of the state the call starts from. Its largest entry is about the largest past key
            to the p-th power.
        dtype: what the call computes in. It must hold 2^(±power · exponent), by which the state is scaled.
    """
    k = k.detach()
    longest = torch.linalg.vector_norm(k, ord=math.inf, dim=(1, 3)).to(dtype) * math.sqrt(k.shape[-1])
    if normalizer is not None:
        past = torch.linalg.vector_norm(normalizer.detach().to(dtype), ord=math.inf, dim=-1)
        longest = torch.maximum(longest, past.pow(1 / power))
    limit = (960 if dtype == torch.float64 else 120) // power
    exponent = torch.frexp(_or_one(longest)).exponent
    return exponent.clamp(-limit, limit)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly. (`torch.ldexp` of the scaled tensor itself has a wrong gradient for negative exponents.)"""
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent)


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
