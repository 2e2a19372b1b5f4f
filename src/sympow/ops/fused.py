"""The attention and chunked forms on the fused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.cost import crossover_length
from sympow.ops.dispatch import CHUNK_MULTIPLE, chunked_kernels_serve
from sympow.ops.numerics import log_gate_root
from sympow.ops.rotary import phase_after
from sympow.ops.sequence import Sequence, divide
from sympow.ops.state import State
from sympow.ops.symmetric import feature_indices, multinomial_weights
from sympow.ops.torch.products import query_state, update_state

if TYPE_CHECKING:
    from sympow.kernels.common import Documents


import math

# Tokens between two states. Larger chunks spend more on scores, smaller ones on states passed through memory.
CHUNK_SIZE = 1024
# The kernels' features number about d², nearly twice the symmetric ones, and reach a smaller part of the peak than
# scores do: the chunked form pays from this many times the context where operations balance (for p = 4 and heads of 16
# from a little more).
CROSSOVER_FACTOR = 1.7
SMALLEST_DIM = 32


def fused_form(
    sequence: Sequence,
    state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for.

    Args:
        sequence: with one gate per head, or none.
        state: what came before, or None.
        return_state: whether to return the state after the last token.
        form: "attention", "chunked" or "auto".
        chunk_size: None: CHUNK_SIZE.
        needs_grad: whether the backward pass will be run.
        cu_seqlens: offsets of packed documents, without states at either end; or None.
    """
    from sympow.kernels.common import close_gates, locate
    from sympow.kernels.rotary import fused_rotation

    documents = None if cu_seqlens is None else locate(cu_seqlens.to(sequence.q.device), sequence.length)
    q, k = sequence.q, sequence.k
    if sequence.theta is not None:
        start = None if state is None else state.phase
        relative = state is None and not return_state
        q, k = fused_rotation(q, k, sequence.beta, sequence.theta, start, documents, relative=relative)
    log_gamma = None if sequence.log_gamma is None else sequence.log_gamma.to(torch.float32)
    if documents is not None:
        log_gamma = close_gates(log_gamma, documents, sequence.key_heads)
    turned = replace(sequence, q=q, k=k, log_gamma=log_gamma)
    if form == "auto":
        with_states = state is not None or return_state
        form = "chunked" if chunk_size is not None or _chunked_pays(sequence, with_states) else "attention"
    if form == "chunked" and sequence.power == 2:
        chunk = min(chunk_size or CHUNK_SIZE, CHUNK_MULTIPLE * -(-sequence.length // CHUNK_MULTIPLE))
        y, kv, normalizer = _chunked(turned, state, return_state, chunk, needs_grad, documents)
    else:
        chunk = (chunk_size or _quartic_chunk(sequence)) if form == "chunked" else 0
        y, kv, normalizer = _attend(turned, state, return_state, chunk, documents)
    if kv is None or normalizer is None:
        return y, None
    phase = None
    if sequence.theta is not None:
        start = None if state is None else state.phase
        phase = phase_after(sequence.theta, sequence.beta, start, sequence.length, sequence.batch, sequence.key_heads)
    return y, State(kv, normalizer, phase, power=sequence.power, key_dim=sequence.key_dim)


def _chunked(
    sequence: Sequence,
    state: State | None,
    return_state: bool,
    chunk: int,
    needs_grad: bool,
    documents: Documents | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The chunked form, p = 2, for turned queries and keys: y, and S and Z after the last token if asked for."""
    from sympow.kernels.attention.op import fused_attention
    from sympow.kernels.states.quadratic import FullState

    dim = _common_dim(sequence)
    initial = None
    if state is not None:
        kv, normalizer = state.kv.to(torch.float32), state.normalizer.to(torch.float32)
        initial = FullState(*to_full(kv, normalizer, sequence.key_dim, dim))
    q, k, v = (_padded(x, dim) for x in (sequence.q, sequence.k, sequence.v))
    y, _, final_kv, final_normalizer, *_ = fused_attention(
        q, k, v, sequence.log_gamma, *(documents or (None, None)), *(initial or (None, None)), 2, chunk, True,
        needs_grad, return_state,
    )  # fmt: skip
    y = y[..., : sequence.value_dim]
    if not return_state:
        return y, None, None
    return y, *from_full(final_kv, final_normalizer, sequence.key_dim, sequence.value_dim)


def _attend(
    sequence: Sequence,
    state: State | None,
    return_state: bool,
    chunk: int,
    documents: Documents | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The attention form for turned queries and keys: y, and S and Z after the last token if asked for.

    The kernels attend within the call, or within chunks, and for p = 4 to earlier chunks. A state given is queried, and
    one asked for is folded, in plain PyTorch.

    Args:
        chunk: tokens of a chunk; 0: all.
    """
    from sympow.kernels.attention.op import fused_attention, query_scales

    dim = _common_dim(sequence)
    q, k, v = (_padded(x, dim) for x in (sequence.q, sequence.k, sequence.v))
    chunk = chunk if chunk < sequence.length else 0
    y, weight, *_ = fused_attention(
        q, k, v, sequence.log_gamma, *(documents or (None, None)), None, None, sequence.power, chunk, False, False,
        False,
    )  # fmt: skip
    y = y[..., : sequence.value_dim]
    decay = _decay(sequence) if state is not None or return_state else None
    parts = []
    if chunk or state is not None:
        # In the scale of the weights. A constant to autograd: y does not depend on it.
        scale = query_scales(q.detach()).transpose(1, 2).unsqueeze(-1).to(q.dtype)
        scaled = replace(sequence, q=sequence.q * scale)
        if chunk:
            parts.append(_query_chunks(scaled, chunk))
        if state is not None and decay is not None:
            parts.append(_query_past(scaled, decay, state))
        y = _join(y, weight, parts, sequence)
    if not return_state or decay is None:
        return y, None, None
    return y, *_fold(sequence, decay, state)


def _decay(sequence: Sequence) -> Tensor:
    """Running sums of log γ^(1/p), zero without gates: (b, h_kv, t, 1) float64."""
    if sequence.log_gamma is None:
        shape = (sequence.batch, sequence.key_heads, sequence.length, 1)
        return torch.zeros(shape, dtype=torch.float64, device=sequence.q.device)
    return log_gate_root(sequence.log_gamma, sequence.power).cumsum(2)


def _query_chunks(sequence: Sequence, chunk: int) -> tuple[Tensor, Tensor]:
    """What earlier chunks add to the sums of each token, p = 4: (b, h_kv, g, t, e) and (b, h_kv, g, t) float32."""
    from sympow.kernels.states.quartic_op import DIMS, VALUE_DIMS, past_attention

    dim = next(size for size in DIMS if size >= sequence.key_dim)
    value_dim = next(size for size in VALUE_DIMS if size >= sequence.value_dim)
    q, k = _padded(sequence.q, dim), _padded(sequence.k, dim)
    v = _padded(sequence.v, value_dim)
    numerator, denominator = past_attention(q, k, v, sequence.log_gamma, sequence.power, chunk)
    by_group = denominator.unflatten(1, (sequence.key_heads, sequence.group))
    return _by_head(numerator[..., : sequence.value_dim], sequence), by_group


def _query_past(sequence: Sequence, decay: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """What a state adds to the sums of each token: (b, h_kv, g, t, e) and (b, h_kv, g, t) float32."""
    kv, normalizer = state.kv.to(torch.float32), state.normalizer.to(torch.float32)
    return query_state(_by_head(sequence.q.to(torch.float32), sequence), decay, kv, normalizer, sequence.power)


def _join(y: Tensor, weight: Tensor, parts: list[tuple[Tensor, Tensor]], sequence: Sequence) -> Tensor:
    """y with what else there is mixed in, in proportion to the weights.

    Args:
        y: what the call alone gives, (b, t, h, e).
        weight: its sums of weights, (b, h, t) float32.
        parts: numerators (b, h_kv, g, t, e) and denominators (b, h_kv, g, t) to add.
    """
    denominator = weight.unflatten(1, (sequence.key_heads, sequence.group))
    numerator = _by_head(y, sequence) * denominator.unsqueeze(-1)
    for more, weights in parts:
        numerator, denominator = numerator + more, denominator + weights
    return divide(numerator, denominator, y.dtype)


def _by_head(x: Tensor, sequence: Sequence) -> Tensor:
    """(b, t, h, n) → (b, h_kv, g, t, n)."""
    return x.unflatten(2, (sequence.key_heads, sequence.group)).permute(0, 2, 3, 1, 4)


def _fold(sequence: Sequence, decay: Tensor, state: State | None) -> tuple[Tensor, Tensor]:
    """S and Z after the last token, from turned keys."""
    keys, values = (x.to(torch.float32).transpose(1, 2) for x in (sequence.k, sequence.v))
    kv = None if state is None else state.kv.to(torch.float32)
    normalizer = None if state is None else state.normalizer.to(torch.float32)
    # Not in place: what is given belongs to the caller.
    return update_state(keys, values, decay, kv, normalizer, sequence.power, in_place=False)


def fused_step(sequence: Sequence, state: State, return_state: bool) -> tuple[Tensor, State | None]:
    """One token from a state, without gradients: y (b, 1, h, e), and the state after it if asked for."""
    from sympow.kernels.decode.op import fused_decode

    y, kv, normalizer, phase = fused_decode(
        *sequence.one_token(),
        state.kv.to(torch.float32).contiguous(),
        state.normalizer.to(torch.float32).contiguous(),
        None if state.phase is None else state.phase.contiguous(),
        feature_indices(sequence.key_dim, sequence.power, sequence.q.device),
        multinomial_weights(sequence.key_dim, sequence.power, torch.float32, sequence.q.device),
    )
    if not return_state:
        return y.unsqueeze(1), None
    phase = phase if sequence.rotated else None
    return y.unsqueeze(1), State(kv, normalizer, phase, power=sequence.power, key_dim=sequence.key_dim)


def _chunked_pays(sequence: Sequence, with_states: bool) -> bool:
    if not chunked_kernels_serve(sequence.power, sequence.key_dim, sequence.value_dim):
        return False
    # With p = 2 the kernels take states in and out; the attention form has them queried and folded outside.
    if with_states and sequence.power == 2:
        return True
    balance = crossover_length(sequence.key_dim, sequence.value_dim, sequence.power, sequence.group)
    return sequence.length > max(CROSSOVER_FACTOR * balance, 2 * CHUNK_SIZE)


def _quartic_chunk(sequence: Sequence) -> int:
    """Tokens of a chunk for p = 4: the larger the state, the fewer of them."""
    return 2048 if sequence.key_dim <= 16 else 4096


def _common_dim(sequence: Sequence) -> int:
    """One power of two for keys and values; zeros change nothing."""
    return max(_block(sequence.key_dim), _block(sequence.value_dim))


def _block(dim: int) -> int:
    return max(SMALLEST_DIM, 1 << (dim - 1).bit_length())


def _padded(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))


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
