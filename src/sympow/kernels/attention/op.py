"""The attention and chunked forms on the kernels as PyTorch operators, with their tile sizes (`tiles_for`).

As operators (`sympow.kernels.operator`) they work with autograd, torch.compile and opcheck.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.kernels.attention.engines import PIECES, Blocks, Call, engine_for
from sympow.kernels.attention.tiles import tiles_for
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
    boundaries_with_states,
    chunk_sums,
    entries_of_high,
    scan_sums,
)


class Saved(NamedTuple):
    """What the backward pass reads besides inputs and outputs; None for what a call does not have.

    Attributes:
        gate_sums, to_end, from_start: as in `Gates`.
        low, high, normalizer: as in `ChunkStates`.
        state_share: φ(q) Z of each row's state, (b, h, t) float32.
        bound, scales, token_scales: as in `KeyRange`, for float16.
    """

    gate_sums: Tensor | None
    to_end: Tensor | None
    from_start: Tensor | None
    low: Tensor | None
    high: Tensor | None
    normalizer: Tensor | None
    state_share: Tensor | None
    bound: Tensor | None
    scales: Tensor | None
    token_scales: Tensor | None

    @property
    def gates(self) -> Gates | None:
        if self.gate_sums is None or self.to_end is None or self.from_start is None:
            return None
        return Gates(self.gate_sums, self.to_end, self.from_start)

    def states(self, chunk: int, first: int) -> ChunkStates | None:
        if self.low is None or self.high is None or self.normalizer is None:
            return None
        return ChunkStates(self.low, self.high, self.normalizer, chunk, first)

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
    train: bool,
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
        train: whether the backward pass will run, which needs all d² features of the states, and in float16 the range
            of the values.
    """
    call = describe(q, v, power, chunk, with_states, initial_kv is not None, return_state, document_start, document_end)
    engine = engine_for(call)
    gates = None if log_gamma is None else gate_sums(log_gamma)
    states = end = key_range = None
    if q.dtype == torch.float16 or engine.in_pieces:
        key_range = measure_keys(
            k, v, power, gates, _largest_entries(initial_kv, initial_normalizer),
            values=train or with_states or engine.in_pieces, token_scales=train and with_states,
        )  # fmt: skip
    if call.reads_states:
        initial = None
        if initial_kv is not None and initial_normalizer is not None:
            initial = FullState(initial_kv, initial_normalizer)
        chunks = chunk_sums(
            k, v, k.shape[2], None if gates is None else gates.sums, chunk,
            full=train or return_state or initial is not None,
            boundaries=call.boundaries, precise=return_state, key_dim=key_dim, update=engine.update,
            scales=None if key_range is None else key_range.of_states, **tiles_for(q).states,
        )  # fmt: skip
        assert chunks is not None
        states, end, _ = scan_sums(chunks, initial, return_end=return_state)
    y, denominator, state_share = engine.attend(call, q, k, v, gates, states, key_range)
    saved_gates = (None, None, None) if gates is None else (gates.sums, gates.to_end, gates.from_start)
    saved_states = (None, None, None) if states is None else (states.low, states.high, states.normalizer)
    saved_ranges = (
        (None, None, None) if key_range is None else (key_range.bound, key_range.scales, key_range.token_scales)
    )
    rest = (*(end or (None, None)), *saved_gates, *saved_states, state_share, *saved_ranges)
    return y.contiguous(), denominator, *rest


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
    train: bool,
    return_state: bool,
) -> tuple[Tensor | None, ...]:
    batch, length, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    y = q.new_empty(batch, length, heads, value_dim)
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    final_kv = final_normalizer = gate_sums = to_end = from_start = low = high = normalizer = state_share = None
    bound = scales = token_scales = None
    call = describe(q, v, power, chunk, with_states, initial_kv is not None, return_state, document_start, document_end)
    # Asks no other engine: a GPU need not be there, and a length may be symbolic.
    if q.dtype == torch.float16 or PIECES.unsupported_reason(call) is None:
        bound = q.new_empty(batch, kv_heads, length, dtype=torch.float32)
        scales = q.new_empty(batch, kv_heads, SCALES.value, dtype=torch.float32)
        if train and with_states:
            token_scales = q.new_empty(batch, kv_heads, 2, length, dtype=torch.float16)
    if log_gamma is not None:
        padded = -(-length // SCAN_BLOCK) * SCAN_BLOCK
        gate_sums = q.new_empty(batch, kv_heads, length, dtype=torch.float64)
        to_end = q.new_empty(batch, kv_heads, padded, dtype=torch.float32)
        from_start = torch.empty_like(to_end)
    if return_state:
        final_kv = q.new_empty(batch, kv_heads, dim, value_dim, dim, dtype=torch.float32)
        final_normalizer = q.new_empty(batch, kv_heads, dim, dim, dtype=torch.float32)
    if call.reads_states:
        count = call.boundaries[1] - call.boundaries[0] + 1
        full = train or return_state or initial_kv is not None
        low = q.new_empty(batch, kv_heads, count, dim // 2, value_dim, dim)
        high_entries = entries_of_high(dim, key_dim)
        high = q.new_empty(batch, kv_heads, count, high_entries, value_dim, dim if full else dim // 2)
        normalizer = q.new_empty(batch, kv_heads, count, dim, dim)
        state_share = torch.empty_like(denominator)
    kept = (gate_sums, to_end, from_start, low, high, normalizer, state_share, bound, scales, token_scales)
    return y, denominator, final_kv, final_normalizer, *kept


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
    reverse = end = crossing = None
    if states is not None:
        start = None
        if return_state:
            assert d_final_kv is not None
            assert d_final_normalizer is not None
            start = FullState(d_final_kv.contiguous(), d_final_normalizer.contiguous())
        chunks = chunk_sums(
            rows.q, rows.dy, k.shape[2], None if gates is None else gates.sums, chunk, full=True,
            factor=rows.minus_delta, state_share=state_share, reverse=True, boundaries=call.boundaries, precise=initial,
            key_dim=key_dim, update=engine.update,
            scales=None if rows.row_gradients is None else rows.row_gradients.of_states,
            token_factor=None if rows.row_gradients is None else rows.row_gradients.factor, **tiles_for(q).states,
        )  # fmt: skip
        assert chunks is not None
        reverse, end, crossing = scan_sums(
            chunks, start, return_end=initial, other=states if gates else None,
            other_scales=None if kept.key_range is None else kept.key_range.of_states,
        )  # fmt: skip
    length, terms = k.shape[1], None
    block = drift_spacing(length)
    if gates is not None and states is None and length > block:
        terms = k.new_zeros(*gates.sums.shape[:2], -(-length // block), length, dtype=torch.float32)
    dk, dv, column_terms = engine.key_gradient(call, rows, gates, reverse, Blocks(terms, block))
    d_log_gamma = None
    if gates is not None:
        # At both ends the exact value is 0: no pair lies across.
        exact, spacing = None, length
        if crossing is not None:
            exact, spacing = exact_sums_at_boundaries(crossing, call.boundaries, length, chunk), chunk
        elif terms is not None:
            exact, spacing = exact_sums_at_blocks(terms, None if rows.row_gradients else gates.to_end, block), block
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
    (
        q,
        k,
        v,
        log_gamma,
        document_start,
        document_end,
        initial_kv,
        _,
        power,
        chunk,
        key_dim,
        with_states,
        _,
        return_state,
    ) = inputs
    y, denominator, final_kv, final_normalizer, *rest = output
    ctx.save_for_backward(q, k, v, y, denominator, document_start, document_end, *rest)
    ctx.options = Options(power, chunk, key_dim, with_states, initial_kv is not None, return_state)
    ctx.gated = log_gamma is not None
    ctx.final_shapes = (final_kv.shape, final_normalizer.shape) if return_state else None
    ctx.set_materialize_grads(False)
    constant = (*rest, *(() if return_state else (final_kv, final_normalizer)))
    ctx.mark_non_differentiable(*(x for x in constant if x is not None))


def _differentiate_attend(ctx, dy, d_denominator, d_final_kv, d_final_normalizer, *_):
    q, k, v, y, denominator, document_start, document_end, *rest = ctx.saved_tensors
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
        dy, d_denominator, d_final_kv, d_final_normalizer, q, k, v, y, denominator, rest, document_start, document_end,
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
