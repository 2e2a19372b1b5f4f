"""Plain PyTorch references of the decoding kernels: one token from a state, from a window, or from a softmax cache.

They share no code with the kernels and need no Triton. Shapes are those of the operators in `op`. Nothing is written in
place: what the kernels update is returned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.kernels.reference import rotate_pairs


class Step(NamedTuple):
    """A token after rotation: q (b, h_kv, group, d), k (b, h_kv, d), v (b, h_kv, e), its log gate and its phase."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gamma: Tensor
    phase: Tensor | None


def features_reference(x: Tensor, index: Tensor, feature_weights: Tensor) -> Tensor:
    """φ(x): the products of the entries `index` (D, p) of x (…, d), times `feature_weights` (D,): (…, D)."""
    return x[..., index.long()].prod(-1) * feature_weights


def decode_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor,
    normalizer: Tensor,
    phase: Tensor | None,
    index: Tensor,
    feature_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Twin of `state_step.decode_step`: y, and the state after the token, S ← γ S + φ(k) vᵀ, Z ← γ Z + φ(k)."""
    token = _rotate(q, k, v, log_gamma, beta, theta, phase)
    gamma, phi_key = token.log_gamma.exp().to(kv.dtype), features_reference(token.k, index, feature_weights)
    kv = gamma[..., None, None] * kv + phi_key.unsqueeze(-1) * token.v.unsqueeze(-2)
    normalizer = gamma.unsqueeze(-1) * normalizer + phi_key
    phi_query = features_reference(token.q, index, feature_weights)
    y = _divide(phi_query @ kv, phi_query @ normalizer.unsqueeze(-1))
    return y.flatten(1, 2), kv, normalizer, token.phase


def window_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    phase: Tensor | None,
    index: Tensor | None,
    feature_weights: Tensor | None,
    power: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Twin of `window_step.window_step`: y, and keys, values, decay and phase with the token appended.

    Args:
        keys, values, decay: of the n tokens in the window, (b, h_kv, d, n), (b, h_kv, n, e) and (b, h_kv, n).
    """
    token = _rotate(q, k, v, log_gamma, beta, theta, phase)
    so_far = decay[..., -1] if decay.shape[-1] else torch.zeros_like(token.log_gamma)
    total = so_far + (token.log_gamma / power).clamp(min=-1000.0)
    keys = torch.cat([keys, token.k.unsqueeze(-1).to(keys.dtype)], dim=-1)
    values = torch.cat([values, token.v.unsqueeze(-2).to(values.dtype)], dim=-2)
    decay = torch.cat([decay, total.unsqueeze(-1)], dim=-1)
    since = ((total.unsqueeze(-1) - decay) * power).exp().to(token.q.dtype)
    scores = (token.q @ keys.to(token.q.dtype)) ** power * since.unsqueeze(2)
    numerator, denominator = scores @ values.to(token.q.dtype), scores.sum(-1, keepdim=True)
    if kv is not None and normalizer is not None and index is not None and feature_weights is not None:
        gamma = (total * power).exp().to(kv.dtype)[..., None, None]
        phi_query = features_reference(token.q, index, feature_weights)
        numerator = numerator + gamma * (phi_query @ kv)
        denominator = denominator + gamma * (phi_query @ normalizer.unsqueeze(-1))
    return _divide(numerator, denominator).flatten(1, 2), keys, values, decay, token.phase


def window_fold_reference(
    kv: Tensor, normalizer: Tensor, keys: Tensor, values: Tensor, decay: Tensor, index: Tensor, feature_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Twin of `window_step.window_fold`: the state with n tokens folded in, S ← γ S + Σ_j b_j φ(k_j) v_jᵀ, and Z
    alike."""
    power = index.shape[1]
    since = ((decay[..., -1:] - decay) * power).exp().to(kv.dtype)
    gamma = (decay[..., -1] * power).exp().to(kv.dtype)
    phi = features_reference(keys.to(kv.dtype).transpose(-1, -2), index, feature_weights) * since.unsqueeze(-1)
    kv = gamma[..., None, None] * kv + phi.transpose(-1, -2) @ values.to(kv.dtype)
    return kv, gamma.unsqueeze(-1) * normalizer + phi.sum(-2)


def state_copy_reference(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of the 16-bit copy that `window_step.window_fold` writes: the copy, float16, and the scales of its rows."""
    exponent = torch.frexp(kv.abs().amax(-1)).exponent - 15
    scale = torch.ldexp(torch.ones_like(kv[..., 0]), exponent).clamp(min=2.0**-126)
    return (kv / scale.unsqueeze(-1)).half(), scale


def softmax_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor | None,
    phase: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Twin of `softmax_step.softmax_step`: y, and keys, values, decay and phase with the token appended.

    Args:
        keys, values, decay: of the n cached tokens, (b, h_kv, n, d), (b, h_kv, n, e) and (b, h_kv, n) or None.
    """
    token = _rotate(q, k, v, log_gamma, beta, theta, phase)
    keys = torch.cat([keys, token.k.unsqueeze(2).to(keys.dtype)], dim=2)
    values = torch.cat([values, token.v.unsqueeze(2).to(values.dtype)], dim=2)
    logits = token.q @ keys.to(token.q.dtype).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if decay is not None:
        so_far = decay[..., -1] if decay.shape[-1] else torch.zeros_like(token.log_gamma)
        decay = torch.cat([decay, (so_far + token.log_gamma.clamp(min=-1e5)).unsqueeze(-1)], dim=-1)
        logits = logits + (decay[..., -1:] - decay).to(logits.dtype).unsqueeze(2)
    return (logits.softmax(-1) @ values.to(token.q.dtype)).flatten(1, 2), keys, values, decay, token.phase


def step_gates_reference(
    x: Tensor, gate_weight: Tensor | None, gate_bias: Tensor | None, rotation_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Twin of `gate_projection.step_gates`: log γ = log σ(W_γ x + b) and β = 1 + tanh(W_β x); empty without weights."""
    log_gamma = beta = x.new_empty(len(x), 0)
    if gate_weight is not None and gate_bias is not None:
        log_gamma = torch.nn.functional.logsigmoid(x @ gate_weight.mT + gate_bias)
    if rotation_weight is not None:
        beta = 1 + (x @ rotation_weight.mT).tanh()
    return log_gamma, beta


def _rotate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    phase: Tensor | None,
) -> Step:
    """The token rotated by μ + β θ, in the dtype of q."""
    batch, heads, _ = k.shape
    q = q.unflatten(1, (heads, -1))
    if theta is not None and phase is not None:
        scale = q.new_ones(1) if beta is None else beta if beta.ndim == 3 else beta.unsqueeze(-1)
        phase = phase + scale.double() * theta.double()
        # Into [−π, π], as the kernels keep it.
        phase = phase - 2 * math.pi * (phase / (2 * math.pi) + 0.5).floor()
        q, k = rotate_pairs(q, phase.unsqueeze(2)), rotate_pairs(k, phase)
    gate = k.new_zeros(batch, heads, dtype=torch.float64) if log_gamma is None else log_gamma.double()
    return Step(q, k, v, gate, phase)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 where nothing has weight."""
    return numerator / torch.where(denominator == 0, 1, denominator)
