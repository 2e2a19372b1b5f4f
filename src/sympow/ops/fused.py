"""The attention and chunked forms on the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.backend import LARGEST_CHUNKED_DIM
from sympow.ops.blocks import query_state, update_state
from sympow.ops.cost import crossover_length
from sympow.ops.decay import log_gate_root
from sympow.ops.rotary import phase_after
from sympow.ops.sequence import Sequence, divide
from sympow.ops.state import State
from sympow.ops.symmetric import feature_indices, multinomial_weights

# Tokens between two states. Larger chunks spend more on scores, smaller ones on states passed through memory.
CHUNK_SIZE = 1024
# The kernels' features number about d², nearly twice the symmetric ones, and reach a smaller part of the peak than
# scores do: the chunked form pays from this many times the context where operations balance.
CROSSOVER_FACTOR = 1.7
SMALLEST_DIM = 32


def fused_form(
    sequence: Sequence,
    state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e), and the state after the last token if asked for.

    The kernels attend within the call. A state given is queried, and one asked for is folded, in plain PyTorch: each
    token once, so that long calls still spend most of their time in kernels.

    Args:
        sequence: with one gate per head, or none.
        state: what came before; not together with gradients.
        return_state: whether to return the state after the last token.
        form: "attention", "chunked" or "auto".
        chunk_size: None: CHUNK_SIZE.
        needs_grad: whether the backward pass will be run.
    """
    from sympow.kernels.attention_op import fused_attention, scaled_queries
    from sympow.kernels.rotation_op import fused_rotation

    q, k, v = sequence.q, sequence.k, sequence.v
    start = None if state is None else state.phase
    if sequence.theta is not None:
        q, k = fused_rotation(q, k, sequence.beta, sequence.theta, start)
    if form == "auto":
        form = "chunked" if chunk_size is not None or _chunked_pays(sequence) else "attention"
    chunk = (chunk_size or CHUNK_SIZE) if form == "chunked" else 0
    # One power of two for keys and values; zeros change nothing.
    dim = max(_block(sequence.key_dim), _block(sequence.value_dim))
    log_gamma = None if sequence.log_gamma is None else sequence.log_gamma.to(torch.float32)
    padded_q, padded_k, padded_v = (_padded(x, dim) for x in (q, k, v))
    y, weight = fused_attention(padded_q, padded_k, padded_v, log_gamma, sequence.power, chunk, train=needs_grad)
    y = y if dim == sequence.value_dim else y[..., : sequence.value_dim]
    if state is None and not return_state:
        return y, None

    decay = _decay(sequence)
    if state is not None:
        y = _add_past(y, weight, scaled_queries(q), decay, state, sequence)
    return y, _fold(k, v, decay, state, sequence) if return_state else None


def _decay(sequence: Sequence) -> Tensor:
    """Running sums of log γ^(1/p), zero without gates: (b, h_kv, t, 1) float64."""
    if sequence.log_gamma is None:
        shape = (sequence.batch, sequence.key_heads, sequence.length, 1)
        return torch.zeros(shape, dtype=torch.float64, device=sequence.q.device)
    return log_gate_root(sequence.log_gamma, sequence.power).cumsum(2)


def _add_past(y: Tensor, weight: Tensor, q: Tensor, decay: Tensor, state: State, sequence: Sequence) -> Tensor:
    """y with what the state holds mixed in, in proportion to the weights of both.

    Args:
        y: what the call alone gives, (b, t, h, e).
        weight: its sums of weights, (b, h, t) float32.
        q: the queries in the scale of those weights, (b, t, h, d).
    """
    grouped = q.to(torch.float32).unflatten(2, (sequence.key_heads, sequence.group)).permute(0, 2, 3, 1, 4)
    kv, normalizer = state.kv.to(torch.float32), state.normalizer.to(torch.float32)
    numerator, denominator = query_state(grouped, decay, kv, normalizer, sequence.power)
    weight = weight.unflatten(1, (sequence.key_heads, sequence.group))
    own = y.unflatten(2, (sequence.key_heads, sequence.group)).permute(0, 2, 3, 1, 4) * weight.unsqueeze(-1)
    return divide(own + numerator, weight + denominator, y.dtype)


def _fold(k: Tensor, v: Tensor, decay: Tensor, state: State | None, sequence: Sequence) -> State:
    """The state after the last token, from turned keys."""
    keys, values = (x.to(torch.float32).transpose(1, 2) for x in (k, v))
    kv = None if state is None else state.kv.to(torch.float32)
    normalizer = None if state is None else state.normalizer.to(torch.float32)
    # Not in place: what is given belongs to the caller.
    kv, normalizer = update_state(keys, values, decay, kv, normalizer, sequence.power, in_place=False)
    phase = None
    if sequence.theta is not None:
        start = None if state is None else state.phase
        phase = phase_after(sequence.theta, sequence.beta, start, sequence.length, sequence.batch, sequence.key_heads)
    return State(kv, normalizer, phase, power=sequence.power, key_dim=sequence.key_dim)


def fused_step(sequence: Sequence, state: State, return_state: bool) -> tuple[Tensor, State | None]:
    """One token from a state, without gradients: y (b, 1, h, e), and the state after it if asked for."""
    from sympow.kernels.decode_op import fused_decode

    y, kv, normalizer, phase = fused_decode(
        sequence.q.squeeze(1),
        sequence.k.squeeze(1),
        sequence.v.squeeze(1),
        None if sequence.log_gamma is None else sequence.log_gamma.squeeze(1),
        None if sequence.beta is None else sequence.beta.squeeze(1),
        sequence.theta,
        state.kv,
        state.normalizer,
        state.phase,
        feature_indices(sequence.key_dim, sequence.power, sequence.q.device),
        multinomial_weights(sequence.key_dim, sequence.power, torch.float32, sequence.q.device),
    )
    after = State(kv, normalizer, phase, power=sequence.power, key_dim=sequence.key_dim) if return_state else None
    return y.unsqueeze(1), after


def _chunked_pays(sequence: Sequence) -> bool:
    if sequence.power != 2 or max(sequence.key_dim, sequence.value_dim) > LARGEST_CHUNKED_DIM:
        return False
    balance = crossover_length(sequence.key_dim, sequence.value_dim, 2, sequence.group)
    return sequence.length > max(CROSSOVER_FACTOR * balance, 2 * CHUNK_SIZE)


def _block(dim: int) -> int:
    return max(SMALLEST_DIM, 1 << (dim - 1).bit_length())


def _padded(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))
