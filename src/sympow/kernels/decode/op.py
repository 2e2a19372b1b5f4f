"""Decoding kernels as PyTorch operators: one token from a state, from a window beside a state, from a softmax cache.

The operators take flat lists of tensors, as PyTorch's schemas require, and pass them to the kernels as the NamedTuples
of `state_step`.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.decode.softmax_step import softmax_step
from sympow.kernels.decode.state_step import RecentTokens, StateArguments, Token, decode_step
from sympow.kernels.decode.window_step import window_fold, window_step
from sympow.kernels.launch import rows_contiguous
from sympow.kernels.operator import operator


def _token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    phase: Tensor | None,
) -> Token:
    """A token of any strides; the phase is not copied, since kernels write to it."""
    log_gamma, beta, theta = (None if x is None else x.contiguous() for x in (log_gamma, beta, theta))
    return Token(rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), log_gamma, beta, theta, phase)


@operator("sympow::decode")
def fused_decode(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token from a state: y (b, h, e), and kv, normalizer and phase (None without rotation) after it.

    Args:
        q, k, v, log_gamma, beta, theta, phase: shapes as in `Token`; the phase contiguous.
        kv, normalizer: (b, h_kv, D, e) and (b, h_kv, D), float32 contiguous.
        index: which entries each feature multiplies, (D, p) int16.
        feature_weights: √ of the features' multinomial coefficients, (D,) float32.
    """
    token = _token(q, k, v, log_gamma, beta, theta, phase)
    out = decode_step(token, StateArguments(kv, normalizer, index, feature_weights))
    return out.y, out.kv, out.normalizer, None if phase is None else out.phase  # type: ignore[return-value]


@fused_decode.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor,
    normalizer: Tensor,
    phase: Tensor | None,
    *_: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    phase_out = None if phase is None else torch.empty_like(phase)
    return _empty_output(q, k, v), torch.empty_like(kv), torch.empty_like(normalizer), phase_out


@operator(
    "sympow::window_step",
    mutates=("keys", "values", "decay", "count", "phase", "arrivals", "workspace"),
)
def fused_window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    scale: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
    index: Tensor | None,
    feature_weights: Tensor | None,
    power: int,
    split_batch: int = 0,
) -> Tensor:
    """y (b, h, e); shapes as in `window_step` and `fused_decode`, of any strides where tensors are not written to.

    Args:
        kv, scale: the state in float32 and None, or its 16-bit copy and the scales of the rows.
    """
    return window_step(
        _token(q, k, v, log_gamma, beta, theta, phase), StateArguments(kv, normalizer, index, feature_weights, scale),
        RecentTokens(keys, values, decay, count), arrivals, workspace.flatten(), power, split_batch,
    )  # fmt: skip


@operator("sympow::window_fold", mutates=("kv", "normalizer", "copy", "scale", "count", "arrivals"))
def fused_fold(
    kv: Tensor,
    normalizer: Tensor,
    copy: Tensor | None,
    scale: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    count: Tensor,
    arrivals: Tensor,
    index: Tensor,
    feature_weights: Tensor,
) -> None:
    """Folds a window's tokens into the state, and writes its 16-bit copy and scales unless they are None; shapes as in
    `fused_window_step`."""
    state = StateArguments(kv, normalizer, index, feature_weights, scale)
    window_fold(state, RecentTokens(keys, values, decay, count), arrivals, copy)


@operator(
    "sympow::softmax_step",
    mutates=("keys", "values", "decay", "count", "phase", "arrivals", "workspace"),
)
def fused_softmax_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor | None,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
) -> Tensor:
    """y (b, h, e); shapes as in `softmax_step`, of any strides where tensors are not written to."""
    token = _token(q, k, v, log_gamma, beta, theta, phase)
    return softmax_step(token, RecentTokens(keys, values, decay, count), arrivals, workspace)


def _empty_output(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _nothing(*_: object) -> None:
    return None


fused_window_step.register_fake(_empty_output)
fused_softmax_step.register_fake(_empty_output)
fused_fold.register_fake(_nothing)
