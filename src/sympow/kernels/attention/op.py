"""The attention and chunked forms on the kernels as PyTorch operators: the steps of a call, forward and backward.

As operators (`sympow.kernels.operator`) they work with autograd, torch.compile and opcheck.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.kernels.attention.engines import Blocks, Call, engine_for, not_in_pieces
from sympow.kernels.common import Documents, scale_queries
from sympow.kernels.float16_range import SCALES, KeyRange, measure_keys
from sympow.kernels.operator import operator
from sympow.kernels.running_sums import (
    SCAN_BLOCK,
    Gates,
    correct_drift,
    drift_spacing,
    exact_sums_at_blocks,
    exact_sums_at_boundaries,
    gate_gradient,
    gate_sums,
)
from sympow.kernels.states.full_state import FullState
from sympow.kernels.states.quadratic import (
    ChunkStates,
    QueryTerms,
    boundaries_with_states,
    chunk_sums,
    entries_of_second_half,
    scan_sums,
)


class Saved(NamedTuple):
    """What the backward pass reads besides inputs and outputs; None for what a call does not have.

    Attributes:
        gate_sums, to_end, from_start: as in `Gates`.
        first_half, second_half, normalizer: as in `ChunkStates`.
        state_share: φ(q) Z of each row's state, (b, h, t) float32.
        bound, scales, token_scales: as in `KeyRange`, for float16.
    """

    gate_sums: Tensor | None = None
    to_end: Tensor | None = None
    from_start: Tensor | None = None
    first_half: Tensor | None = None
    second_half: Tensor | None = None
    normalizer: Tensor | None = None
    state_share: Tensor | None = None
    bound: Tensor | None = None
    scales: Tensor | None = None
    token_scales: Tensor | None = None

    @property
    def gates(self) -> Gates | None:
        if self.gate_sums is None or self.to_end is None or self.from_start is None:
            return None
        return Gates(self.gate_sums, self.to_end, self.from_start)

    def states(self, chunk: int, first: int) -> ChunkStates | None:
        if self.first_half is None or self.second_half is None or self.normalizer is None:
            return None
        return ChunkStates(self.first_half, self.second_half, self.normalizer, chunk, first)

    @property
    def key_range(self) -> KeyRange | None:
        if self.bound is None or self.scales is None:
            return None
        return KeyRange(self.bound, self.scales, self.token_scales)


class Options(NamedTuple):
    """What the backward pass has to know of the call.

    Attributes:
        power: p.
        chunk: tokens per chunk; 0: all in one.
        key_dim: entries of q and k after which they are padded with zeros.
        with_states: whether chunks see earlier ones through states (p = 2).
        initial: whether there is a state before the first token.
        return_state: whether the state after the last token is returned.
    """

    power: int
    chunk: int
    key_dim: int
    with_states: bool
    initial: bool
    return_state: bool


@operator("sympow::attend")
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
    key_dim: int,
    with_states: bool,
    needs_grad: bool,
    return_state: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """The attention form, or with states the chunked form (p = 2): y (b, t, h, e), the rows' denominators (b, h, t) for
    queries scaled by `query_scales`, kv and normalizer of the final state, and the fields of `Saved`.

    Args:
        q, k, v: as in `sympow.attention`, already rotated.
        log_gamma: one gate per head, closed between documents, (b, t, h_kv) float32; or None.
        document_start, document_end: as in `common.Documents`, or None.
        initial_kv, initial_normalizer: a `FullState`, only with states; or None.
        power, chunk, key_dim, with_states, return_state: as in `Options`.
        needs_grad: whether the backward pass will run, which needs all d² features of the states, and in float16 the
            range of the values.
    """
    call = describe(q, v, power, chunk, with_states, initial_kv is not None, return_state, document_start, document_end)
    engine = engine_for(call)
    gates = None if log_gamma is None else gate_sums(log_gamma)
    states = end = key_range = None
    if q.dtype == torch.float16 or engine.in_pieces:
        key_range = measure_keys(
            k, v, power, gates, _largest_entries(initial_kv, initial_normalizer),
            values=needs_grad or with_states or engine.in_pieces, token_scales=needs_grad and with_states,
        )  # fmt: skip
    if call.reads_states:
        initial = None
        if initial_kv is not None and initial_normalizer is not None:
            initial = FullState(initial_kv, initial_normalizer)
        chunks = chunk_sums(
            k, v, k.shape[2], gates, chunk, full=needs_grad or return_state or initial is not None,
            boundaries=call.boundaries, precise=return_state, key_dim=key_dim, update=engine.update(k),
            scales=None if key_range is None else key_range.of_states,
        )  # fmt: skip
        assert chunks is not None
        states, end, _ = scan_sums(chunks, initial, return_end=return_state)
    y, denominator, state_share = engine.attend(call, q, k, v, gates, states, key_range)
    saved = Saved(state_share=state_share)
    if gates is not None:
        saved = saved._replace(gate_sums=gates.sums, to_end=gates.to_end, from_start=gates.from_start)
    if states is not None:
        first_half, second_half = states.first_half, states.second_half
        saved = saved._replace(first_half=first_half, second_half=second_half, normalizer=states.normalizer)
    if key_range is not None:
        bound, scales, token_scales = key_range.bound, key_range.scales, key_range.token_scales
        saved = saved._replace(bound=bound, scales=scales, token_scales=token_scales)
    return y.contiguous(), denominator, *(end or (None, None)), *saved


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
    key_dim: int,
    with_states: bool,
    needs_grad: bool,
    return_state: bool,
) -> tuple[Tensor | None, ...]:
    batch, length, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    y = q.new_empty(batch, length, heads, value_dim)
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    final_kv = final_normalizer = None
    saved = Saved()
    call = describe(q, v, power, chunk, with_states, initial_kv is not None, return_state, document_start, document_end)
    # Asks no other engine: a GPU need not be there, and a length may be symbolic.
    if q.dtype == torch.float16 or not_in_pieces(call) is None:
        saved = saved._replace(
            bound=q.new_empty(batch, kv_heads, length, dtype=torch.float32),
            scales=q.new_empty(batch, kv_heads, SCALES.value, dtype=torch.float32),
        )
        if needs_grad and with_states:
            saved = saved._replace(token_scales=q.new_empty(batch, kv_heads, 2, length, dtype=torch.float16))
    if log_gamma is not None:
        padded = -(-length // SCAN_BLOCK) * SCAN_BLOCK
        saved = saved._replace(
            gate_sums=q.new_empty(batch, kv_heads, length, dtype=torch.float64),
            to_end=q.new_empty(batch, kv_heads, padded, dtype=torch.float32),
            from_start=q.new_empty(batch, kv_heads, padded, dtype=torch.float32),
        )
    if return_state:
        final_kv = q.new_empty(batch, kv_heads, dim, value_dim, dim, dtype=torch.float32)
        final_normalizer = q.new_empty(batch, kv_heads, dim, dim, dtype=torch.float32)
    if call.reads_states:
        count = call.boundaries[1] - call.boundaries[0] + 1
        columns = dim if needs_grad or return_state or initial_kv is not None else dim // 2
        saved = saved._replace(
            first_half=q.new_empty(batch, kv_heads, count, dim // 2, value_dim, dim),
            second_half=q.new_empty(batch, kv_heads, count, entries_of_second_half(dim, key_dim), value_dim, columns),
            normalizer=q.new_empty(batch, kv_heads, count, dim, dim),
            state_share=torch.empty_like(denominator),
        )
    return y, denominator, final_kv, final_normalizer, *saved


@operator("sympow::attend_backward")
def _attend_backward(
    dy: Tensor,
    d_denominator: Tensor | None,
    d_final_kv: Tensor | None,
    d_final_normalizer: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    denominator: Tensor,
    saved: list[Tensor | None],
    document_start: Tensor | None,
    document_end: Tensor | None,
    power: int,
    chunk: int,
    key_dim: int,
    with_states: bool,
    initial: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, d log γ and the gradients of the initial state's kv and normalizer (each None if there is none).

    Args:
        dy, d_denominator, d_final_kv, d_final_normalizer: gradients of what `sympow::attend` returned.
        q, k, v, y, denominator: its inputs and outputs.
        saved: the fields of `Saved`.
        power, chunk, key_dim, with_states, initial, return_state: as in `Options`.
    """
    kept = Saved(*saved)
    call = describe(q, v, power, chunk, with_states, initial, return_state, document_start, document_end)
    engine = engine_for(call)
    gates, states, state_share = kept.gates, kept.states(chunk, call.boundaries[0]), kept.state_share
    d_final = None if kept.key_range is None else _largest_entries(d_final_kv, d_final_normalizer)
    rows = engine.prepare(call, q, k, v, y, dy, denominator, d_denominator, kept.key_range, d_final)
    dq, row_terms = engine.query_gradient(call, rows, gates, states, state_share)
    d_states = end = crossing = None
    row_gradients = rows.row_gradients
    if states is not None and state_share is not None:
        start = None
        if return_state:
            assert d_final_kv is not None
            assert d_final_normalizer is not None
            start = FullState(d_final_kv.contiguous(), d_final_normalizer.contiguous())
        chunks = chunk_sums(
            rows.scaled_q, rows.dy, k.shape[2], gates, chunk, full=True,
            queries=QueryTerms(rows.minus_delta, state_share, None if row_gradients is None else row_gradients.factor),
            boundaries=call.boundaries, precise=initial, key_dim=key_dim, update=engine.update(q),
            scales=None if row_gradients is None else row_gradients.of_states,
        )  # fmt: skip
        assert chunks is not None
        d_states, end, crossing = scan_sums(
            chunks, start, return_end=initial, other=states if gates else None,
            other_scales=None if kept.key_range is None else kept.key_range.of_states,
        )  # fmt: skip
    length, terms = k.shape[1], None
    block = drift_spacing(length)
    if gates is not None and states is None and length > block:
        terms = k.new_zeros(*gates.sums.shape[:2], -(-length // block), length, dtype=torch.float32)
    dk, dv, column_terms = engine.key_gradient(call, rows, gates, d_states, Blocks(terms, block))
    d_log_gamma = None
    if gates is not None:
        # At both ends the exact value is 0: no pair lies across.
        exact, spacing = None, length
        if crossing is not None:
            exact, spacing = exact_sums_at_boundaries(crossing, call.boundaries, length, chunk), chunk
        elif terms is not None:
            exact, spacing = exact_sums_at_blocks(terms, None if row_gradients else gates.to_end, block), block
        d_log_gamma = correct_drift(gate_gradient(row_terms, column_terms, power), exact, spacing, document_end)
    rest = (d_log_gamma, *(end or (None, None)))
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), *rest


@_attend_backward.register_fake
def _(
    dy: Tensor,
    d_denominator: Tensor | None,
    d_final_kv: Tensor | None,
    d_final_normalizer: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    denominator: Tensor,
    saved: list[Tensor | None],
    document_start: Tensor | None,
    document_end: Tensor | None,
    *options: Any,
) -> tuple[Tensor | None, ...]:
    batch, length, kv_heads, dim = k.shape
    value_dim, initial = v.shape[-1], Options(*options).initial
    shapes = (
        (batch, length, kv_heads) if saved[0] is not None else None,
        (batch, kv_heads, dim, value_dim, dim) if initial else None,
        (batch, kv_heads, dim, dim) if initial else None,
    )
    contiguous = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return (*contiguous, *(s if s is None else q.new_empty(s, dtype=torch.float32) for s in shapes))


def _save_attend(ctx, inputs, output) -> None:
    q, k, v, log_gamma, *documents, initial_kv, _, power, chunk, key_dim, with_states, _, return_state = inputs
    y, denominator, final_kv, final_normalizer, *saved = output
    ctx.save_for_backward(q, k, v, y, denominator, *documents, *saved)
    ctx.options = Options(power, chunk, key_dim, with_states, initial_kv is not None, return_state)
    ctx.gated = log_gamma is not None
    ctx.final_shapes = (final_kv.shape, final_normalizer.shape) if return_state else None
    ctx.set_materialize_grads(False)
    constant = (*saved, *(() if return_state else (final_kv, final_normalizer)))
    ctx.mark_non_differentiable(*(x for x in constant if x is not None))


def _differentiate_attend(ctx, dy, d_denominator, d_final_kv, d_final_normalizer, *_):
    q, k, v, y, denominator, document_start, document_end, *saved = ctx.saved_tensors
    # A loss may depend on some of the outputs only.
    dy = torch.zeros_like(y) if dy is None else dy
    d_denominator = None if d_denominator is None else d_denominator.contiguous()
    if ctx.options.return_state:
        d_final_kv, d_final_normalizer = (
            q.new_zeros(shape, dtype=torch.float32) if gradient is None else gradient
            for gradient, shape in zip((d_final_kv, d_final_normalizer), ctx.final_shapes, strict=True)
        )
    else:
        d_final_kv = d_final_normalizer = None
    dq, dk, dv, d_log_gamma, d_kv, d_normalizer = _attend_backward(
        dy, d_denominator, d_final_kv, d_final_normalizer, q, k, v, y, denominator, saved, document_start, document_end,
        *ctx.options,
    )  # fmt: skip
    gradients = (dq, dk, dv, d_log_gamma if ctx.gated else None, None, None)
    d_initial = (d_kv, d_normalizer) if ctx.options.initial else (None, None)
    return (*gradients, *d_initial, None, None, None, None, None, None)


fused_attention.register_gradient(_save_attend, _differentiate_attend)


@operator("sympow::query_scales")
def query_scales(q: Tensor) -> Tensor:
    """The powers of two that the kernels scale each query by: (b, h, t) float32."""
    return scale_queries(q)[1]


@query_scales.register_fake
def _(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def describe(
    q: Tensor, v: Tensor, power: int, chunk: int, with_states: bool, initial: bool, return_state: bool,
    document_start: Tensor | None, document_end: Tensor | None,
) -> Call:  # fmt: skip
    """What chooses the engine of a call; arguments as in `fused_attention` and `Options`."""
    documents = None
    if document_start is not None and document_end is not None:
        documents = Documents(document_start, document_end)
    boundaries = boundaries_with_states(q.shape[1], chunk, initial, return_state) if with_states else (1, 0)
    return Call(
        q.device if q.is_cuda else None, q.dtype, q.shape[-1], v.shape[-1], q.shape[1], power, chunk, with_states,
        boundaries, documents,
    )  # fmt: skip


def _largest_entries(kv: Tensor | None, normalizer: Tensor | None) -> Tensor | None:
    """max|S| and max|Z| of a `FullState`, (b, h_kv, 2); None without one."""
    if kv is None or normalizer is None:
        return None
    found = (x.abs().flatten(2).amax(-1) for x in (kv, normalizer))
    # What is not finite shows itself.
    return torch.stack(list(found), dim=-1).nan_to_num(0.0, posinf=0.0)
