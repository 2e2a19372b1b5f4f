"""The attention and chunked forms on the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.backend import LARGEST_CHUNKED_DIM
from sympow.ops.cost import crossover_length
from sympow.ops.sequence import Sequence
from sympow.ops.state import State
from sympow.ops.symmetric import feature_indices, multinomial_weights

# Tokens between two states. Larger chunks spend more on scores, smaller ones on states passed through memory.
CHUNK_SIZE = 1024
# The kernels' features number about d², nearly twice the symmetric ones, and reach a smaller part of the peak than
# scores do: the chunked form pays from this many times the context where operations balance.
CROSSOVER_FACTOR = 1.7
SMALLEST_DIM = 32


def fused_form(sequence: Sequence, form: str, chunk_size: int | None, needs_grad: bool) -> Tensor:
    """y (b, t, h, e), from no state and to none.

    Args:
        sequence: with one gate per head, or none.
        form: "attention", "chunked" or "auto".
        chunk_size: None: CHUNK_SIZE.
        needs_grad: whether the backward pass will be run.
    """
    from sympow.kernels import library

    q, k, v = sequence.q, sequence.k, sequence.v
    log_gamma = None if sequence.log_gamma is None else sequence.log_gamma.to(torch.float32)
    if sequence.theta is not None:
        q, k = library.rotate(q, k, sequence.beta, sequence.theta, None)
    if form == "auto":
        form = "chunked" if chunk_size is not None or _chunked_pays(sequence) else "attention"
    # One power of two for keys and values; zeros change nothing.
    dim = max(_block(sequence.key_dim), _block(sequence.value_dim))
    q, k, v = (_padded(x, dim) for x in (q, k, v))
    chunk = (chunk_size or CHUNK_SIZE) if form == "chunked" else 0
    y = library.attention(q, k, v, log_gamma, sequence.power, chunk, train=needs_grad)
    return y if dim == sequence.value_dim else y[..., : sequence.value_dim]


def fused_step(sequence: Sequence, state: State, return_state: bool) -> tuple[Tensor, State | None]:
    """One token from a state, without gradients: y (b, 1, h, e), and the state after it if asked for."""
    from sympow.kernels import library

    y, kv, normalizer, phase = library.decode(
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
