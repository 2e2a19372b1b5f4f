"""Scaling of queries and keys that keeps every score within range and leaves the output unchanged; decays in log space.

The output does not change when a query is scaled, nor when all keys of a head are scaled by s and its state by s^p. So
queries are normalized to unit length, and each key is divided by a power of two that bounds the length of every key so
far, decayed to this token. Then no score exceeds 2^p, and no row depends on later tokens. Where a longer key raises the
power of two, earlier keys shrink by the same factor as under a gate, and are treated so (`Prepared.decay`); where gates
lower it, earlier keys have decayed by as much. The scales are constants to autograd, and the gradient is still exact,
since the output does not depend on them.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sympow.ops.symmetric import monomial_rows


def least_exponent(dtype: torch.dtype) -> int:
    """The exponent of a head before its first nonzero key, and the lower bound of all exponents."""
    return -1000 if dtype == torch.float64 else -120


def unit_length(q: Tensor) -> Tensor:
    """q / |q| along the last axis, zero staying zero, with |q| constant to autograd."""
    # In two steps, since |q|² can overflow float32 where |q| does not.
    largest = _or_one(largest_entry(q.detach()).unsqueeze(-1))
    reduced = q / largest
    return reduced / _or_one(reduced.detach().norm(dim=-1, keepdim=True))


def running_key_exponents(k: Tensor, start: Tensor, decay: Tensor | None = None) -> Tensor:
    """Exponents of powers of two that bound the key of each token and all earlier, decayed ones: (b, t, h_kv) int32.

    Each is the smallest such exponent or one less, since decays are rounded to powers of two.

    Args:
        k: (b, t, h_kv, d).
        start: exponents before the first token, (b, h_kv).
        decay: running sums of log γ^(1/p), (b, h_kv, t, 1 or d/2); None: nothing decays.
    """
    return running_exponents(largest_entry(k.detach()), k.shape[-1], start, decay)


def running_exponents(largest: Tensor, dim: int, start: Tensor, decay: Tensor | None) -> Tensor:
    """As `running_key_exponents`, from the largest entry of each key (b, t, h_kv)."""
    root = math.ceil(math.log2(dim) / 2)  # |k| ≤ √d max |k_i|, as exponents: the product could overflow
    exponents = torch.where(largest == 0, least_exponent(largest.dtype), torch.frexp(largest).exponent + root)
    if decay is None:
        return torch.maximum(exponents.cummax(dim=1).values, start.unsqueeze(1))
    # At token i the bound from token j has decayed by faded_i − faded_j; without gates both are zero.
    faded = _binary_digits(decay.detach())
    running = torch.maximum((exponents - faded).cummax(dim=1).values, start.unsqueeze(1))
    return (running + faded).to(torch.int32)


def _binary_digits(decay: Tensor) -> Tensor:
    """Running sums of log γ^(1/p) in whole powers of two, rounded up: (b, h_kv, t, 1 or d/2) → (b, t, h_kv) int64.

    With a gate per pair, the sum over steps of the pair that decays least: a bound for all pairs.
    """
    if decay.shape[-1] == 1:
        least = decay.squeeze(-1)
    else:
        least = torch.cat([decay[:, :, :1], decay.diff(dim=2)], dim=2).amax(-1).cumsum(2)
    return (least / math.log(2)).ceil().to(torch.int64).transpose(1, 2)


def state_exponents(normalizer: Tensor, power: int) -> Tensor:
    """The exponents by which to scale a state of unscaled keys: (b, h_kv, D) → (b, h_kv) int32.

    The largest entry of a normalizer is about the p-th power of the longest key. The factor 2^(−power · exponent) of
    the state is always finite.
    """
    bound = largest_entry(normalizer.detach()).pow(1 / power)
    least = least_exponent(normalizer.dtype)
    limit = -least // power
    return torch.where(bound == 0, least, torch.frexp(bound).exponent).clamp(-limit, limit)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exact; 0 or infinity out of range."""
    # torch.ldexp is not applied to the scaled tensor: its gradient is wrong for negative exponents.
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent)


def largest_entry(x: Tensor) -> Tensor:
    """max_i |x_i| along the last axis, on a CPU ten times as fast as torch's norm."""
    return torch.maximum(x.amax(-1), -x.amin(-1))


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


# log γ^(1/p) for γ = 0, finite so that differences of running sums are (log γ = −inf would give inf − inf). The longest
# key of float64 is 2^2098 times the shortest, and exp(−2500) times that is still 0.
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


def decay_to_meet(q: Tensor, k: Tensor, row_decay: Tensor, column_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and earlier keys decayed to a token between them, so that their product has decayed from key to query.

    Args:
        q: (b, n, g, t, d).
        k: (b, n, s, d).
        row_decay, column_decay: running sums of log γ^(1/p) at queries (b, n, t, 1 or d/2) and at keys (b, n, s, ·).
    """
    reference = row_decay[:, :, :1]  # of the first query, so that no exponent exceeds log 2
    return apply_decay(q, (row_decay - reference).unsqueeze(2)), apply_decay(k, reference - column_decay)


def feature_decay(log_root: Tensor, power: int, dtype: torch.dtype) -> Tensor:
    """The factors of the features for a decay of the keys: (..., 1 or d/2) → (..., 1 or D).

    The diagonal of P̄ for P = diag(exp(log_root)), each pair sharing a factor: scaling keys by P scales a state by it.
    """
    if log_root.shape[-1] == 1:
        return (log_root * power).exp().to(dtype)
    return monomial_rows(log_root.exp().repeat_interleave(2, dim=-1).mT, power).mT.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context that disables autocast; it does nothing where autocast is not enabled, as on the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device_type=device.type, enabled=False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which plain PyTorch computes and keeps states, for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
