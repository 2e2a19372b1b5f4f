"""Attention on the kernels as a PyTorch operator: visible to autograd, torch.compile and torch.library.opcheck.

An operator's outputs are tensors and nothing else, so what is missing (gates, states) is an empty tensor here.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels import hopper
from sympow.kernels.attention.backward import key_gradient, prepare, query_gradient
from sympow.kernels.attention.forward import attend
from sympow.kernels.attention.tiles import COLUMNS, tiles_for
from sympow.kernels.common import Documents, scale_queries
from sympow.kernels.gates import SCAN_BLOCK, Gates, gate_gradient, running_sums, span_anchors
from sympow.kernels.running_sums import anchored, boundary_anchors
from sympow.kernels.states.quadratic import ChunkStates, FullState, chunk_sums, scan_sums

# Queries between two places where the gates' gradient is put right in the attention form (`anchoring`).
SPAN = 4096
# What they leave grows with their number and the length.
MOST_SPANS = 16
# Beyond, the portable kernel of the keys' gradient is the faster one.
LONGEST_ON_HOPPER = 8192


@torch.library.custom_op("sympow::attend", mutates_args=())
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    document_start: Tensor | None,
    document_end: Tensor | None,
    initial_kv: Tensor | None,
    initial_normalizer: Tensor | None,
    power: int,
    chunk: int,
    with_states: bool,
    train: bool,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, h, e), the rows' weights, the final state, and what the backward pass reads: gates and states.

    Args:
        q, k, v: as in `sympow.attention`, already rotated.
        log_gamma: one gate per head, closed between documents, (b, t, h_kv) float32; or None.
        document_start, document_end: as in `documents.Documents`, or None.
        initial_kv, initial_normalizer: a `FullState`, only with states; or None.
        power: p.
        chunk: tokens per chunk; 0: all in one.
        with_states: whether chunks see those before them through states (p = 2).
        train: whether the backward pass will be run, which needs states in full; of no account without states.
        final: whether to return the state after the last token; only with states.
    """
    tiles = tiles_for(q.shape[-1])
    gates = None if log_gamma is None else running_sums(log_gamma, COLUMNS)
    documents = _documents(document_start, document_end)
    states = end = None
    if with_states:
        initial = None
        if initial_kv is not None and initial_normalizer is not None:
            initial = FullState(initial_kv, initial_normalizer)
        chunks = chunk_sums(
            k, v, k.shape[2], gates.sums if gates else None, chunk, full=train or final or initial is not None,
            boundaries=boundaries_with_states(k, chunk, initial is not None, final), precise=final, **tiles.states,
        )  # fmt: skip
        if chunks is not None:
            states, end, _ = scan_sums(chunks, initial, want_end=final)
    if _on_hopper(q, k, v, chunk, documents):
        from sympow.kernels.hopper.forward import attend as attend_on_hopper

        y, weight = attend_on_hopper(q, k, v, power, gates)
        past = None
    else:
        y, weight, past = attend(
            q, k, v, power, gates, states, chunk=0 if with_states else chunk, documents=documents, **tiles.forward
        )
    rest = (*(end or (None, None)), *_gate_tensors(gates), *_state_tensors(states), past)
    return (y.contiguous(), weight, *(q.new_empty(0) if x is None else x for x in rest))  # type: ignore[return-value]


@fused_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    document_start: Tensor | None,
    document_end: Tensor | None,
    initial_kv: Tensor | None,
    initial_normalizer: Tensor | None,
    power: int,
    chunk: int,
    with_states: bool,
    train: bool,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    y = q.new_empty(batch, length, heads, value_dim)
    weight = q.new_empty(batch, heads, length, dtype=torch.float32)
    end_kv = end_normalizer = sums = to_end = from_start = low = high = normalizer = past = None
    if log_gamma is not None:
        padded = -(-length // SCAN_BLOCK) * SCAN_BLOCK
        sums = q.new_empty(batch, kv_heads, length, dtype=torch.float64)
        to_end = q.new_empty(batch, kv_heads, padded, dtype=torch.float32)
        from_start = torch.empty_like(to_end)
    if final:
        end_kv = q.new_empty(batch, kv_heads, dim, value_dim, dim, dtype=torch.float32)
        end_normalizer = q.new_empty(batch, kv_heads, dim, dim, dtype=torch.float32)
    if with_states:
        first, last = boundaries_with_states(k, chunk, initial_kv is not None, final)
        slots = last - first + 1
        if slots:
            full = train or final or initial_kv is not None
            low = q.new_empty(batch, kv_heads, slots, dim // 2, value_dim, dim)
            high = q.new_empty(batch, kv_heads, slots, dim // 2, value_dim, dim if full else dim // 2)
            normalizer = q.new_empty(batch, kv_heads, slots, dim, dim)
            past = torch.empty_like(weight)
    rest = (end_kv, end_normalizer, sums, to_end, from_start, low, high, normalizer, past)
    return (y, weight, *(q.new_empty(0) if x is None else x for x in rest))  # type: ignore[return-value]


@torch.library.custom_op("sympow::attend_backward", mutates_args=())
def _attend_backward(
    dy: Tensor,
    d_weight: Tensor | None,
    d_final_kv: Tensor | None,
    d_final_normalizer: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    weight: Tensor,
    sums: Tensor,
    to_end: Tensor,
    from_start: Tensor,
    low: Tensor,
    high: Tensor,
    normalizer: Tensor,
    past: Tensor,
    document_start: Tensor | None,
    document_end: Tensor | None,
    power: int,
    chunk: int,
    with_states: bool,
    initial: bool,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, d log γ and the gradients of the initial state (each empty if there is none), from what
    `sympow::attend` returned."""
    tiles = tiles_for(q.shape[-1])
    gates = Gates(sums, to_end, from_start, COLUMNS) if sums.numel() else None
    documents = _documents(document_start, document_end)
    first, last = boundaries_with_states(k, chunk, initial, final) if with_states else (1, 0)
    states = ChunkStates(low, high, normalizer, chunk, first) if low.numel() else None
    inner = 0 if with_states else chunk
    q, scale = scale_queries(q)
    divided, minus_delta = prepare(y, dy, weight, d_weight)
    on_hopper = _on_hopper(q, k, v, chunk, documents)
    if on_hopper:
        from sympow.kernels.hopper import backward as hopper_backward
        from sympow.kernels.hopper.common import split_sums

        parts = None if gates is None else split_sums(gates)
        dq, rows = hopper_backward.query_gradient(q, scale, k, v, divided, minus_delta, power, gates, parts)
    else:
        dq, rows = query_gradient(
            q, scale, k, v, divided, minus_delta, power, gates, states, past=past,
            chunk=inner, documents=documents, **tiles.query,
        )  # fmt: skip
    reverse = end = crossing = None
    if states is not None:
        start = None
        if final:
            assert d_final_kv is not None
            assert d_final_normalizer is not None
            start = FullState(d_final_kv.contiguous(), d_final_normalizer.contiguous())
        chunks = chunk_sums(
            q, divided, k.shape[2], gates.sums if gates else None, chunk, full=True, factor=minus_delta, past=past,
            reverse=True, boundaries=(first, last), precise=initial, **tiles.states,
        )  # fmt: skip
        assert chunks is not None
        reverse, end, crossing = scan_sums(chunks, start, want_end=initial, other=states if gates else None)
    spans = None
    span = max(SPAN, -(-k.shape[1] // MOST_SPANS // COLUMNS) * COLUMNS)
    if gates is not None and states is None and k.shape[1] > span:
        spans = k.new_zeros(*sums.shape[:2], -(-k.shape[1] // span), k.shape[1], dtype=torch.float32)
    if on_hopper and spans is None and k.shape[1] <= LONGEST_ON_HOPPER:
        dk, dv, columns = hopper_backward.key_gradient(q, k, v, divided, minus_delta, power, gates, parts)
    else:
        dk, dv, columns = key_gradient(
            q, k, v, divided, minus_delta, power, gates, reverse,
            chunk=inner, documents=documents, spans=spans, span=span, **tiles.key,
        )  # fmt: skip
    d_log_gamma = None
    if gates is not None:
        # No pair lies across either end.
        anchors, spacing = None, k.shape[1]
        if crossing is not None:
            anchors, spacing = boundary_anchors(crossing, (first, last), k.shape[1], chunk), chunk
        elif spans is not None:
            anchors, spacing = span_anchors(spans, to_end, span), span
        d_log_gamma = anchored(gate_gradient(rows, columns, power), anchors, spacing, document_end)
    rest = (d_log_gamma, *(end or (None, None)))
    none = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in rest)
    return (dq.contiguous(), dk.contiguous(), dv.contiguous(), *none)  # type: ignore[return-value]


@_attend_backward.register_fake
def _(
    dy: Tensor,
    d_weight: Tensor | None,
    d_final_kv: Tensor | None,
    d_final_normalizer: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    weight: Tensor,
    sums: Tensor,
    to_end: Tensor,
    from_start: Tensor,
    low: Tensor,
    high: Tensor,
    normalizer: Tensor,
    past: Tensor,
    document_start: Tensor | None,
    document_end: Tensor | None,
    power: int,
    chunk: int,
    with_states: bool,
    initial: bool,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, kv_heads, dim = k.shape
    value_dim = v.shape[-1]
    gates = (batch, length, kv_heads) if sums.numel() else (0,)
    kv = (batch, kv_heads, dim, value_dim, dim) if initial else (0,)
    normalizer_shape = (batch, kv_heads, dim, dim) if initial else (0,)
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(q, memory_format=contiguous),
        torch.empty_like(k, memory_format=contiguous),
        torch.empty_like(v, memory_format=contiguous),
        q.new_empty(gates, dtype=torch.float32),
        q.new_empty(kv, dtype=torch.float32),
        q.new_empty(normalizer_shape, dtype=torch.float32),
    )


def _save_attend(ctx, inputs, output) -> None:
    q, k, v, log_gamma, document_start, document_end, initial_kv, _, power, chunk, with_states, _, final = inputs
    y, weight, end_kv, end_normalizer, *rest = output
    ctx.save_for_backward(q, k, v, y, weight, *rest, document_start, document_end)
    ctx.options = (power, chunk, with_states, initial_kv is not None, final)
    ctx.gated = log_gamma is not None
    ctx.final_shapes = (end_kv.shape, end_normalizer.shape)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*rest, *(() if final else (end_kv, end_normalizer)))


def _differentiate_attend(ctx, dy, d_weight, d_final_kv, d_final_normalizer, *_):
    saved = ctx.saved_tensors
    *_, initial, final = ctx.options
    # A loss may depend on a part of the outputs only.
    dy = torch.zeros_like(saved[3]) if dy is None else dy
    d_weight = None if d_weight is None else d_weight.contiguous()
    if final:
        d_final_kv, d_final_normalizer = (
            saved[0].new_zeros(shape, dtype=torch.float32) if gradient is None else gradient
            for gradient, shape in zip((d_final_kv, d_final_normalizer), ctx.final_shapes, strict=True)
        )
    dq, dk, dv, d_log_gamma, d_kv, d_normalizer = _attend_backward(
        dy, d_weight, d_final_kv, d_final_normalizer, *saved, *ctx.options
    )
    gradients = (dq, dk, dv, d_log_gamma if ctx.gated else None, None, None)
    return (*gradients, *((d_kv, d_normalizer) if initial else (None, None)), None, None, None, None, None)


fused_attention.register_autograd(_differentiate_attend, setup_context=_save_attend)


@torch.library.custom_op("sympow::query_scales", mutates_args=())
def query_scales(q: Tensor) -> Tensor:
    """The powers of two that the kernels scale each query by: (b, h, t) float32."""
    return scale_queries(q)[1]


@query_scales.register_fake
def _(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _on_hopper(q: Tensor, k: Tensor, v: Tensor, chunk: int, documents: Documents | None) -> bool:
    """Whether the kernels written for Hopper take the call."""
    if chunk or documents is not None or not q.is_cuda:
        return False
    return hopper.serves(q, k, v)


def boundaries_with_states(k: Tensor, chunk: int, initial: bool, final: bool) -> tuple[int, int]:
    """The first and last boundary that has a state."""
    chunks = -(-k.shape[1] // chunk)
    return (0 if initial else 1), (chunks if final else chunks - 1)


def _documents(start: Tensor | None, end: Tensor | None) -> Documents | None:
    return None if start is None or end is None else Documents(start, end)


def _gate_tensors(gates: Gates | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if gates is None else (gates.sums, gates.to_end, gates.from_start)


def _state_tensors(states: ChunkStates | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if states is None else (states.low, states.high, states.normalizer)
