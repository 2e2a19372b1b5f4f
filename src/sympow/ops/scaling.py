"""Scales that leave the output unchanged and keep every score within range.

The output does not change when a query is scaled, nor when all keys of a head are scaled together with its state
(by s, and by s^p). So a query is brought to unit length, and a key is divided by a power of two no less than the length
of any key so far, each as short as gates have made it since; then no score exceeds 2^p, whatever the keys, and no row
depends on what comes after it. Where a longer key raises that power of two, what came before shrinks by the same
factor, exactly as under a gate, and is treated as one (`Prepared.decay`); where gates lower it, what came before has
decayed by as much. The scales are constants to autograd: for a function that does not depend on the scale of its
argument, the gradient is exact without them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def least_exponent(dtype: torch.dtype) -> int:
    """Where a head starts before its first key other than zero; keys are not scaled up further than this."""
    return -1000 if dtype == torch.float64 else -120


def unit_length(q: Tensor) -> Tensor:
    """q / |q| along the last axis, zero staying zero, with |q| constant to autograd."""
    # In two steps, since |q|² may leave the range of float32 where |q| does not.
    largest = _or_one(q.detach().abs().amax(-1, keepdim=True))
    reduced = q / largest
    return reduced / _or_one(reduced.detach().norm(dim=-1, keepdim=True))


def running_key_exponents(k: Tensor, start: Tensor, decay: Tensor | None = None) -> Tensor:
    """For each token a power of two that bounds its key and what is left of all before it: (b, t, h_kv) int32.

    It is the least one, or half of it: decays count in whole powers of two.

    Args:
        k: (b, t, h_kv, d).
        start: exponents before the first token, (b, h_kv).
        decay: running sums of log γ^(1/p), (b, h_kv, t, 1 or d/2); None: nothing decays.
    """
    largest = torch.linalg.vector_norm(k.detach(), ord=math.inf, dim=-1)
    root = math.ceil(math.log2(k.shape[-1]) / 2)  # |k| ≤ √d max |k_i|, as exponents: the product could overflow
    exponents = torch.where(largest == 0, least_exponent(k.dtype), torch.frexp(largest).exponent + root)
    if decay is None:
        return torch.maximum(exponents.cummax(dim=1).values, start.unsqueeze(1))
    # Whatever was recorded at token j has shrunk by faded_i − faded_j since; without gates both are zero.
    faded = _binary_digits(decay.detach())
    record = torch.maximum((exponents - faded).cummax(dim=1).values, start.unsqueeze(1))
    return (record + faded).to(torch.int32)


def _binary_digits(decay: Tensor) -> Tensor:
    """Running sums of log γ^(1/p) in whole powers of two, rounded up: (b, h_kv, t, 1 or d/2) → (b, t, h_kv) int64.

    Where pairs have gates of their own, that of the pair which decays least at each step: a bound for all.
    """
    if decay.shape[-1] == 1:
        least = decay.squeeze(-1)
    else:
        least = torch.cat([decay[:, :, :1], decay.diff(dim=2)], dim=2).amax(-1).cumsum(2)
    return (least / math.log(2)).ceil().to(torch.int64).transpose(1, 2)


def state_exponents(normalizer: Tensor, power: int) -> Tensor:
    """The exponents at which a state of unscaled keys stands: (b, h_kv, D) → (b, h_kv) int32.

    The largest entry of a normaliser is about the p-th power of the longest key. The result is such that scaling the
    state by 2^(−power · exponent) takes a finite factor.
    """
    bound = torch.linalg.vector_norm(normalizer.detach(), ord=math.inf, dim=-1).pow(1 / power)
    least = least_exponent(normalizer.dtype)
    limit = -least // power
    return torch.where(bound == 0, least, torch.frexp(bound).exponent).clamp(-limit, limit)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly; 0 or infinity out of range."""
    # Not `torch.ldexp` of whatever is scaled: its gradient is wrong for negative exponents.
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent)


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
