"""Rotary embeddings (RoPE) with an accumulated, possibly data-dependent, phase (paper §2.2 and §3.2).

Phases are accumulated in float64: θ_1 = 2π radians per token, so in float32 one rounding step of the running sum is
already 0.05 rad after 65,536 tokens. The functions return angles in [−π, π], which any dtype represents well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sympow.checks import check_finite, check_size
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.ops.compilation import check_is_tensor, runs_now_on_cpu
from sympow.settings import check_max_rate


def rotary_rates(
    dim: int,
    max_document: int,
    *,
    max_rate: float = 2 * math.pi,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """θ_i = θ_1 / N^(2(i-1)/d), one rate per pair of entries (paper §2.2): (dim / 2,).

    Args:
        dim: head dim d, even.
        max_document: N, the length of the longest document expected.
        max_rate: θ_1, radians per token of the fastest pair; the paper's is 2π.
        dtype: float64 unless asked otherwise: a rate is multiplied by the position, and so is its rounding.
    """
    check_size("dim", dim, 0)
    if dim < 2 or dim % 2:
        raise ArgumentError("dim", f"must be even and positive: rotation acts on pairs of entries; got {dim}")
    check_finite("max_document", max_document)
    if max_document < 1:
        raise ArgumentError("max_document", f"must be at least 1, got {max_document}")
    check_max_rate(max_rate)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentTypeError("dtype", f"must be a floating-point dtype, got {dtype}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return (max_rate / float(max_document) ** exponents).to(dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """R(angles) x: rotates the pair (x[2j], x[2j+1]) by angles[j] (paper §2.2): (..., d), (..., d/2) → (..., d).

    Reduce large angles in float64 first (`wrap_angle`), since float32 cannot represent them accurately.
    """
    check_is_tensor("x", x)
    check_is_tensor("angles", angles)
    if not x.is_floating_point():
        raise ArgumentTypeError("x", f"must be floating point, got {x.dtype}")
    if x.shape[-1] % 2:
        raise ArgumentError("x", f"must have an even last axis to be rotated in pairs, got {x.shape[-1]}")
    if angles.shape[-1] != x.shape[-1] // 2:
        raise ArgumentError(
            "angles", f"must hold one angle per pair, so {x.shape[-1] // 2} on the last axis; got {angles.shape[-1]}"
        )
    angles = angles.to(x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if runs_now_on_cpu(x):
        # The same products and sums in fewer passes over memory. Both operands are contiguous, so that rounding is that
        # of one loop, whichever axes share their angles.
        pairs = torch.view_as_complex(x.to(angles.dtype).unflatten(-1, (-1, 2)).contiguous())
        turns = torch.complex(cos, sin).expand(pairs.shape).contiguous()
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def wrap_angle(angle: Tensor) -> Tensor:
    """The same angle in [−π, π]; its gradient is that of the identity."""
    revolutions = (angle.detach() / (2 * math.pi)).round()
    return angle - revolutions * (2 * math.pi)


def accumulate_phase(
    theta: Tensor,
    beta: Tensor | None = None,
    initial_phase: Tensor | None = None,
    *,
    length: int | None = None,
) -> Tensor:
    """μ_i = μ_{i-1} + β_i θ for i = 1 … length (paper §3.2), wrapped, in float64.

    Args:
        theta: (d/2,) rates.
        beta: (b, t, h_kv) or (b, t, h_kv, d/2); None means β = 1 throughout, RoPE.
        initial_phase: μ_0, (b, h_kv, d/2); None means zero.
        length: t; needed only without beta.

    Returns:
        (b, t, h_kv, d/2); axes b and h_kv are 1 where all batch entries or heads have the same phase.
    """
    check_is_tensor("theta", theta)
    if theta.ndim != 1:
        raise ArgumentError("theta", f"must have one axis, a rate per pair of entries; got shape {tuple(theta.shape)}")
    if beta is not None:
        check_is_tensor("beta", beta)
        if beta.ndim not in (3, 4):
            raise ArgumentError(
                "beta", f"must be (batch, time, heads) or (batch, time, heads, pairs), got shape {tuple(beta.shape)}"
            )
        if beta.ndim == 4 and beta.shape[3] != theta.shape[0]:
            raise ArgumentError(
                "beta", f"must have a scale for each of the {theta.shape[0]} pairs of theta, got {beta.shape[3]}"
            )
    if length is None:
        if beta is None:
            raise ArgumentError("length", "must be given where beta is not")
        length = beta.shape[1]
    if beta is not None and beta.shape[1] != length:
        raise ArgumentError("beta", f"must have as many tokens as length says, {length}; got {beta.shape[1]}")
    check_size("length", length, 0)
    if initial_phase is not None:
        _check_initial_phase(initial_phase, theta, beta)
    rates = theta.to(torch.float64)
    if beta is None:
        steps = torch.arange(1, length + 1, dtype=torch.float64, device=theta.device)
        phase = steps[None, :, None, None] * rates
    elif beta.ndim == 3:
        phase = beta.to(torch.float64).cumsum(1).unsqueeze(-1) * rates
    else:
        phase = beta.to(torch.float64).cumsum(1) * rates
    if initial_phase is not None:
        phase = phase + initial_phase.to(torch.float64).unsqueeze(1)
    return wrap_angle(phase)


def _check_initial_phase(initial_phase: Tensor, theta: Tensor, beta: Tensor | None) -> None:
    check_is_tensor("initial_phase", initial_phase)
    shape, pairs = initial_phase.shape, theta.shape[0]
    if beta is None:
        if len(shape) != 3 or shape[2] != pairs:
            raise ArgumentError("initial_phase", f"must be (batch, heads, {pairs}), got shape {tuple(shape)}")
        return
    batch, _, heads, *_ = beta.shape
    if shape != (batch, heads, pairs):
        raise ArgumentError("initial_phase", f"must be {(batch, heads, pairs)}, got shape {tuple(shape)}")


def phase_after(
    theta: Tensor, beta: Tensor | None, initial_phase: Tensor | None, length: int, batch: int, heads: int
) -> Tensor:
    """μ after `length` tokens, without those in between, (b, h_kv, d/2) float64; arguments as in `accumulate_phase`."""
    phase = wrap_angle(unwrapped_phase_after(theta, beta, initial_phase, length))
    return phase.expand(batch, heads, -1).clone(memory_format=torch.contiguous_format)


def unwrapped_phase_after(theta: Tensor, beta: Tensor | None, initial_phase: Tensor | None, length: int) -> Tensor:
    """`phase_after` without wrapping: (b, h_kv, d/2), or (d/2,) where all sequences have the same phase."""
    rates = theta.to(torch.float64)
    if beta is None:
        phase = length * rates
    else:
        total = beta.sum(1, dtype=torch.float64)
        phase = (total.unsqueeze(-1) if beta.ndim == 3 else total) * rates
    return phase if initial_phase is None else phase + initial_phase


def last_phase(phases: Tensor, initial_phase: Tensor | None, batch: int, heads: int) -> Tensor:
    """μ after the last of the phases from `accumulate_phase`, for every sequence and head: (b, h_kv, d/2)."""
    if phases.shape[1]:
        # A copy, since a view would keep the phases of all tokens in memory.
        return phases[:, -1].expand(batch, heads, -1).clone(memory_format=torch.contiguous_format)
    if initial_phase is not None:
        return initial_phase
    return phases.new_zeros(batch, heads, phases.shape[-1])
