"""The chunked form, p = 2, in steps between which a state can pass to and from other GPUs.

Forward: `fold` sums over the tokens of each chunk, and adds up what the shard leaves by itself; with the state that
came, `attend` gives outputs. Backward: `fold_gradient` sums over queries and output gradients, and adds up what the
shard's own outputs want of the state that came; `query_gradient` needs nothing from elsewhere; with the gradient of the
state that left, `key_gradient` gives the rest. As many products as without other GPUs: a state that came is added to
the sums of chunks, which are scanned twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sympow.kernels import attention_backward, attention_forward
from sympow.kernels.anchoring import anchored, boundary_anchors
from sympow.kernels.attention_op import boundaries_with_states
from sympow.kernels.chunk_states import ChunkStates, ChunkSums, FullState, chunk_sums, end_alone, scan_sums
from sympow.kernels.gates import Gates, gate_gradient, running_sums
from sympow.kernels.scaling import scale_queries
from sympow.kernels.tiles import COLUMNS, tiles_for


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


@dataclass(frozen=True)
class Folded:
    """After `fold`.

    Attributes:
        gates: their running sums, or None.
        chunks: what each chunk alone leaves; None if no chunk sees another, and no state comes or leaves.
        end: what all of them leave together, from nothing; None if nothing leaves.
    """

    gates: Gates | None
    chunks: ChunkSums | None
    end: FullState | None


@dataclass(frozen=True)
class FoldedGradient:
    """After `fold_gradient`.

    Attributes:
        q, scale: queries as the kernels scale them, and by how much.
        dy, minus_delta: as `attention_backward.prepare` gives them.
        chunks: what the outputs of each chunk alone want; None as in `Folded`.
        end: the gradient of the state that came, as far as it is due to this shard's outputs; None if none came.
    """

    q: Tensor
    scale: Tensor
    dy: Tensor
    minus_delta: Tensor
    chunks: ChunkSums | None
    end: FullState | None


@dataclass(frozen=True)
class Attended:
    """What the backward pass reads beside q, k, v and y: the rows' weights, gates, states, and their part of those."""

    weight: Tensor
    gates: Gates | None
    states: ChunkStates | None
    past: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All there are, for autograd to keep."""
        gates, states = self.gates, self.states
        return (
            self.weight,
            self.past,
            *((None,) * 3 if gates is None else (gates.sums, gates.to_end, gates.from_start)),
            *((None,) * 3 if states is None else (states.low, states.high, states.normalizer)),
        )

    @classmethod
    def of(cls, tensors: Sequence[Any], plan: Plan) -> Attended:
        """From `tensors`."""
        weight, past, *rest = tensors
        (sums, to_end, from_start), (low, high, normalizer) = rest[:3], rest[3:]
        return cls(
            weight,
            None if sums is None else Gates(sums, to_end, from_start, COLUMNS),
            None if low is None else ChunkStates(low, high, normalizer, plan.chunk, 0 if plan.initial else 1),
            past,
        )


def fold(k: Tensor, v: Tensor, log_gamma: Tensor | None, plan: Plan) -> Folded:
    """Sums over turned keys and values.

    Args:
        k, v: (b, t, h_kv, d) and (b, t, h_kv, e).
        log_gamma: (b, t, h_kv) float32, or None.
    """
    gates = None if log_gamma is None else running_sums(log_gamma, COLUMNS)
    chunks = chunk_sums(
        k, v, k.shape[2], None if gates is None else gates.sums, plan.chunk, full=True, boundaries=_boundaries(k, plan),
        precise=plan.final, **tiles_for(k.shape[-1]).states,
    )  # fmt: skip
    return Folded(gates, chunks, end_alone(chunks) if plan.final and chunks is not None else None)


def attend(q: Tensor, k: Tensor, v: Tensor, folded: Folded, initial: FullState | None) -> tuple[Tensor, Attended]:
    """y (b, t, h, e), from turned queries and keys and the state that came; after it, `folded` is spent."""
    states = None if folded.chunks is None else scan_sums(folded.chunks, initial)[0]
    y, weight, past = attention_forward.attend(q, k, v, 2, folded.gates, states, **tiles_for(q.shape[-1]).forward)
    return y.contiguous(), Attended(weight, folded.gates, states, past)


def fold_gradient(dy: Tensor, q: Tensor, k: Tensor, y: Tensor, attended: Attended, plan: Plan) -> FoldedGradient:
    """Sums over queries and the gradient dy of y, contiguous."""
    scaled, scale = scale_queries(q)
    divided, minus_delta = attention_backward.prepare(y, dy, attended.weight)
    sums = None if attended.gates is None else attended.gates.sums
    chunks = chunk_sums(
        scaled, divided, k.shape[2], sums, plan.chunk, full=True, factor=minus_delta, past=attended.past, reverse=True,
        boundaries=_boundaries(k, plan), precise=plan.initial, **tiles_for(q.shape[-1]).states,
    )  # fmt: skip
    end = end_alone(chunks) if plan.initial and chunks is not None else None
    return FoldedGradient(scaled, scale, divided, minus_delta, chunks, end)


def query_gradient(k: Tensor, v: Tensor, attended: Attended, gradient: FoldedGradient) -> tuple[Tensor, Tensor]:
    """dq (b, t, h, d), and q_i · dq_i, which the gradient of the gates is found from."""
    dq, rows = attention_backward.query_gradient(
        gradient.q, gradient.scale, k, v, gradient.dy, gradient.minus_delta, 2, attended.gates, attended.states,
        past=attended.past, **tiles_for(k.shape[-1]).query,
    )  # fmt: skip
    return dq.contiguous(), rows


def key_gradient(
    d_final: FullState | None,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    gradient: FoldedGradient,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dk, dv and d log γ (b, t, h_kv) float32 (None without gates); after it, `gradient` is spent.

    Args:
        d_final: of the state that left; None if none did.
        rows: from `query_gradient`.
    """
    gates, reverse, crossing = attended.gates, None, None
    if gradient.chunks is not None:
        reverse, _, crossing = scan_sums(gradient.chunks, d_final, other=attended.states if gates else None)
    dk, dv, columns = attention_backward.key_gradient(
        gradient.q, k, v, gradient.dy, gradient.minus_delta, 2, gates, reverse, **tiles_for(k.shape[-1]).key
    )
    d_log_gamma = None
    if gates is not None:
        anchors, spacing = None, k.shape[1]
        if crossing is not None:
            anchors = boundary_anchors(crossing, _boundaries(k, plan), k.shape[1], plan.chunk)
            spacing = plan.chunk
        d_log_gamma = anchored(gate_gradient(rows, columns, 2), anchors, spacing)
    return dk.contiguous(), dv.contiguous(), d_log_gamma


def _boundaries(k: Tensor, plan: Plan) -> tuple[int, int]:
    return boundaries_with_states(k, plan.chunk, plan.initial, plan.final)
