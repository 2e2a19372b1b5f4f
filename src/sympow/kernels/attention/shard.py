"""The chunked form of one shard of a sequence, p = 2, in steps between which states pass between GPUs.

Forward: `fold` computes the sums of each chunk and the state that the shard's own tokens add up to, which is sent; once
the incoming state has arrived, `attend` computes the outputs. Backward: `fold_gradient` computes the sums over queries
and output gradients and, from them, the gradient of the incoming state, which is sent; `query_gradient` needs nothing
from other GPUs; once the gradient of the outgoing state has arrived, `key_gradient` computes the rest. There are as
many matrix products as on one GPU: the incoming state is added to the sums of chunks, which are scanned twice.

Each step accepts a slice of the heads and writes to views of the outputs. What is faster for all heads at once comes
before (`gate_sums`, `prepare_gradient`) and after (`gates_gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.kernels import running_sums
from sympow.kernels.attention import backward as attention_backward
from sympow.kernels.attention import forward as attention_forward
from sympow.kernels.attention.tiles import tiles_for
from sympow.kernels.common import scale_queries
from sympow.kernels.running_sums import Gates, correct_drift, exact_sums_at_boundaries, gate_gradient
from sympow.kernels.states import quadratic
from sympow.kernels.states.full_state import FullState
from sympow.kernels.states.quadratic import (
    ChunkStates,
    ChunkSums,
    QueryTerms,
    boundaries_with_states,
    chunk_sums,
    end_alone,
    scan_sums,
)


@dataclass(frozen=True)
class Plan:
    """The position of a shard in its document.

    Attributes:
        chunk: tokens per chunk.
        initial: whether a state comes in: the document began in an earlier shard.
        return_state: whether a state goes out: the document continues in a later shard.
    """

    chunk: int
    initial: bool
    return_state: bool


class Folded(NamedTuple):
    """The result of `fold` or `fold_gradient`.

    Attributes:
        chunks: the sums of each chunk alone; None if there is one chunk and no state comes in or goes out.
        end: after `fold`, the state after the shard's tokens if none came in; after `fold_gradient`, the gradient of
            the incoming state due to this shard's outputs; None if no state goes out, or none came in.
    """

    chunks: ChunkSums | None
    end: FullState | None


class Outputs(NamedTuple):
    """What `attend` writes: y (b, t, h, e); the rows' denominators and the states' shares of them, φ(q) Z, (b, h, t)
    float32 each."""

    y: Tensor
    denominator: Tensor
    state_share: Tensor

    @classmethod
    def new(cls, q: Tensor, v: Tensor, plan: Plan) -> Outputs:
        """Uninitialized, for queries and values of all heads."""
        batch, length, heads, _ = q.shape
        denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
        # Without an incoming state the first chunk has no state, and nothing is written for it.
        state_share = torch.empty_like(denominator) if plan.initial else torch.zeros_like(denominator)
        return cls(v.new_empty(batch, length, heads, v.shape[-1]), denominator, state_share)


class ShardRows(NamedTuple):
    """What the backward pass reads of rows: scaled queries and scales (`scale_queries`), dy' and −δ (`prepare`)."""

    scaled_q: Tensor
    scale: Tensor
    dy: Tensor
    minus_delta: Tensor


class Gradients(NamedTuple):
    """What the backward pass writes: gradients of q, k and v; and q_i · dq_i (b, h, t) and k_j · dk_j (b, h_kv, t),
    float32, from which the gates' gradient follows."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    row_terms: Tensor
    column_terms: Tensor

    @classmethod
    def new(cls, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Uninitialized, for queries, keys and values of all heads."""
        terms = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], dtype=torch.float32) for x in (q, k))
        return cls(*(x.new_empty(x.shape) for x in (q, k, v)), *terms)


def gate_sums(log_gamma: Tensor | None) -> Gates | None:
    """What the kernels read of the gates (b, t, h_kv) float32; None without gates."""
    return None if log_gamma is None else running_sums.gate_sums(log_gamma)


def fold(k: Tensor, v: Tensor, gates: Gates | None, plan: Plan) -> Folded:
    """Folds rotated keys (b, t, h_kv, d) and values (b, t, h_kv, e) into the sums of chunks."""
    chunks = chunk_sums(
        k, v, k.shape[2], gates, plan.chunk, full=True, boundaries=_boundaries(k, plan),
        precise=plan.return_state, update=partial(quadratic.update, **tiles_for(k).states),
    )  # fmt: skip
    return Folded(chunks, end_alone(chunks) if plan.return_state and chunks is not None else None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, chunks: ChunkSums | None, initial: FullState | None,
    out: Outputs,
) -> ChunkStates | None:  # fmt: skip
    """Writes the outputs, from rotated queries and keys and the incoming state, and returns the states at the chunk
    boundaries, which overwrite `chunks`."""
    states = None if chunks is None else scan_sums(chunks, initial)[0]
    attention_forward.attend(q, k, v, 2, gates, states, out=out, **tiles_for(q).forward)
    return states


def prepare_gradient(dy: Tensor, q: Tensor, out: Outputs) -> ShardRows:
    """What the other steps read of the rows, from the gradient dy of y, contiguous."""
    return ShardRows(*scale_queries(q), *attention_backward.prepare(out.y, dy, out.denominator))


def fold_gradient(rows: ShardRows, k: Tensor, gates: Gates | None, state_share: Tensor, plan: Plan) -> Folded:
    """Folds queries and output gradients into the sums of chunks; `state_share` as in `Outputs`."""
    chunks = chunk_sums(
        rows.scaled_q, rows.dy, k.shape[2], gates, plan.chunk, full=True,
        queries=QueryTerms(rows.minus_delta, state_share), boundaries=_boundaries(k, plan), precise=plan.initial,
        update=partial(quadratic.update, **tiles_for(k).states),
    )  # fmt: skip
    return Folded(chunks, end_alone(chunks) if plan.initial and chunks is not None else None)


def query_gradient(
    rows: ShardRows,
    k: Tensor,
    v: Tensor,
    gates: Gates | None,
    states: ChunkStates | None,
    state_share: Tensor,
    out: Gradients,
) -> None:
    """Writes dq and the rows' terms."""
    attention_backward.query_gradient(
        rows.scaled_q, rows.scale, k, v, rows.dy, rows.minus_delta, 2, gates, states, state_share=state_share,
        out=(out.dq, out.row_terms), **tiles_for(k).query,
    )  # fmt: skip


def key_gradient(
    rows: ShardRows, k: Tensor, v: Tensor, gates: Gates | None, states: ChunkStates | None, chunks: ChunkSums | None,
    d_final: FullState | None, out: Gradients,
) -> Tensor | None:  # fmt: skip
    """Writes dk, dv and the columns' terms; overwrites `chunks`.

    Args:
        states: from `attend`.
        chunks: from `fold_gradient`.
        d_final: gradient of the outgoing state; None if there is none.

    Returns:
        Σ B_ij dB_ij over the pairs across each boundary that has a state, (b, h_kv, boundaries) float64; None without
        gates or states.
    """
    d_states = crossing = None
    if chunks is not None:
        d_states, _, crossing = scan_sums(chunks, d_final, other=states if gates else None)
    attention_backward.key_gradient(
        rows.scaled_q, k, v, rows.dy, rows.minus_delta, 2, gates, d_states, out=(out.dk, out.dv, out.column_terms),
        **tiles_for(k).key,
    )  # fmt: skip
    return crossing


def gates_gradient(k: Tensor, out: Gradients, crossing: Tensor | None, plan: Plan) -> Tensor:
    """d log γ (b, t, h_kv) float32; `crossing` as `key_gradient` returns it."""
    exact, spacing = None, k.shape[1]
    if crossing is not None:
        exact, spacing = exact_sums_at_boundaries(crossing, _boundaries(k, plan), k.shape[1], plan.chunk), plan.chunk
    return correct_drift(gate_gradient(out.row_terms, out.column_terms, 2), exact, spacing)


def _boundaries(k: Tensor, plan: Plan) -> tuple[int, int]:
    return boundaries_with_states(k.shape[1], plan.chunk, plan.initial, plan.return_state)
