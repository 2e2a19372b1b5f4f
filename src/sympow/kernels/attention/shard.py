"""The chunked form, p = 2, in steps between which a state can pass to and from other GPUs.

Forward: `fold` sums over the tokens of each chunk, and adds up what the shard leaves by itself; with the state that
came, `attend` gives outputs. Backward: `fold_gradient` sums over queries and output gradients, and adds up what the
shard's own outputs want of the state that came; `query_gradient` needs nothing from elsewhere; with the gradient of the
state that left, `key_gradient` gives the rest. As many products as without other GPUs: a state that came is added to
the sums of chunks, which are scanned twice.

These steps may be taken with some of the heads at a time, writing to their part of what holds all of them. What is best
done with all heads at once comes before (`running_sums`, `prepare_gradient`) and after (`gates_gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.kernels import gates
from sympow.kernels.attention import backward as attention_backward
from sympow.kernels.attention import forward as attention_forward
from sympow.kernels.attention.op import boundaries_with_states
from sympow.kernels.attention.tiles import COLUMNS, tiles_for
from sympow.kernels.common import scale_queries
from sympow.kernels.gates import Gates, gate_gradient
from sympow.kernels.running_sums import anchored, boundary_anchors
from sympow.kernels.states.quadratic import ChunkStates, ChunkSums, FullState, chunk_sums, end_alone, scan_sums


@dataclass(frozen=True)
class Plan:
    """What a shard is to the document it is a part of.

    Attributes:
        chunk: tokens that are summed up at a time.
        initial: whether a state comes.
        final: whether one leaves.
    """

    chunk: int
    initial: bool
    final: bool


class Folded(NamedTuple):
    """After `fold` or `fold_gradient`.

    Attributes:
        chunks: what each chunk alone leaves, or its outputs want; None if no chunk sees another, and no state comes or
            leaves.
        end: what all of them leave together, from nothing, or the gradient of the state that came, as far as it is due
            to this shard's outputs; None if nothing leaves, or none came.
    """

    chunks: ChunkSums | None
    end: FullState | None


class Outputs(NamedTuple):
    """What `attend` writes: y (b, t, h, e), and per head (b, h, t) float32 the rows' weights and the states' part of
    those."""

    y: Tensor
    weight: Tensor
    past: Tensor

    @classmethod
    def new(cls, q: Tensor, v: Tensor, plan: Plan) -> Outputs:
        """For queries and values of all heads."""
        batch, length, heads, _ = q.shape
        weight = q.new_empty(batch, heads, length, dtype=torch.float32)
        # Without a state that came, the first chunk has none to write what it gave.
        past = torch.empty_like(weight) if plan.initial else torch.zeros_like(weight)
        return cls(v.new_empty(batch, length, heads, v.shape[-1]), weight, past)


class Rows(NamedTuple):
    """What the backward pass reads of a row: queries as the kernels scale them, and by how much; dy' and −δ, as
    `attention_backward.prepare` gives them."""

    q: Tensor
    scale: Tensor
    dy: Tensor
    minus_delta: Tensor


class Gradients(NamedTuple):
    """What the backward pass writes: gradients of q, k and v, and q_i · dq_i (b, h, t) and k_j · dk_j (b, h_kv, t)
    float32, from which the gradient of the gates is found."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    row_terms: Tensor
    column_terms: Tensor

    @classmethod
    def new(cls, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """For queries, keys and values of all heads."""
        terms = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], dtype=torch.float32) for x in (q, k))
        return cls(*(x.new_empty(x.shape) for x in (q, k, v)), *terms)


def running_sums(log_gamma: Tensor | None) -> Gates | None:
    """What the kernels read of the gates (b, t, h_kv) float32; None without."""
    return None if log_gamma is None else gates.running_sums(log_gamma, COLUMNS)


def fold(k: Tensor, v: Tensor, gates: Gates | None, plan: Plan) -> Folded:
    """Sums over turned keys (b, t, h_kv, d) and values (b, t, h_kv, e)."""
    chunks = chunk_sums(
        k, v, k.shape[2], None if gates is None else gates.sums, plan.chunk, full=True, boundaries=_boundaries(k, plan),
        precise=plan.final, **tiles_for(k.shape[-1]).states,
    )  # fmt: skip
    return Folded(chunks, end_alone(chunks) if plan.final and chunks is not None else None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, chunks: ChunkSums | None, initial: FullState | None,
    out: Outputs,
) -> ChunkStates | None:  # fmt: skip
    """Writes outputs, from turned queries and keys and the state that came. Returns the states at the boundaries of
    chunks; after it, `chunks` is spent."""
    states = None if chunks is None else scan_sums(chunks, initial)[0]
    attention_forward.attend(q, k, v, 2, gates, states, out=out, **tiles_for(q.shape[-1]).forward)
    return states


def prepare_gradient(dy: Tensor, q: Tensor, out: Outputs) -> Rows:
    """From the gradient dy of y, contiguous."""
    return Rows(*scale_queries(q), *attention_backward.prepare(out.y, dy, out.weight))


def fold_gradient(rows: Rows, k: Tensor, gates: Gates | None, past: Tensor, plan: Plan) -> Folded:
    """Sums over queries and output gradients; `past` as in `Outputs`."""
    chunks = chunk_sums(
        rows.q, rows.dy, k.shape[2], None if gates is None else gates.sums, plan.chunk, full=True,
        factor=rows.minus_delta, past=past, reverse=True, boundaries=_boundaries(k, plan), precise=plan.initial,
        **tiles_for(k.shape[-1]).states,
    )  # fmt: skip
    return Folded(chunks, end_alone(chunks) if plan.initial and chunks is not None else None)


def query_gradient(
    rows: Rows, k: Tensor, v: Tensor, gates: Gates | None, states: ChunkStates | None, past: Tensor, out: Gradients
) -> None:
    """Writes dq and the rows' terms."""
    attention_backward.query_gradient(
        rows.q, rows.scale, k, v, rows.dy, rows.minus_delta, 2, gates, states, past=past, out=(out.dq, out.row_terms),
        **tiles_for(k.shape[-1]).query,
    )  # fmt: skip


def key_gradient(
    rows: Rows, k: Tensor, v: Tensor, gates: Gates | None, states: ChunkStates | None, chunks: ChunkSums | None,
    d_final: FullState | None, out: Gradients,
) -> Tensor | None:  # fmt: skip
    """Writes dk, dv and the columns' terms; after it, `chunks` is spent.

    Args:
        states: from `attend`.
        chunks: from `fold_gradient`.
        d_final: gradient of the state that left; None if none did.

    Returns:
        Σ B_ij dB_ij over the pairs across each boundary that has a state, (b, h_kv, boundaries) float64; None without
        gates or states.
    """
    reverse = crossing = None
    if chunks is not None:
        reverse, _, crossing = scan_sums(chunks, d_final, other=states if gates else None)
    attention_backward.key_gradient(
        rows.q, k, v, rows.dy, rows.minus_delta, 2, gates, reverse, out=(out.dk, out.dv, out.column_terms),
        **tiles_for(k.shape[-1]).key,
    )  # fmt: skip
    return crossing


def gates_gradient(k: Tensor, out: Gradients, crossing: Tensor | None, plan: Plan) -> Tensor:
    """d log γ (b, t, h_kv) float32; `crossing` as `key_gradient` returns it."""
    anchors, spacing = None, k.shape[1]
    if crossing is not None:
        anchors, spacing = boundary_anchors(crossing, _boundaries(k, plan), k.shape[1], plan.chunk), plan.chunk
    return anchored(gate_gradient(out.row_terms, out.column_terms, 2), anchors, spacing)


def _boundaries(k: Tensor, plan: Plan) -> tuple[int, int]:
    return boundaries_with_states(k, plan.chunk, plan.initial, plan.final)
