"""The PyTorch operator for the attention and chunked forms with a gate per rotated pair, and its tiles
(`pair_tiles_for`).

As for one gate per head (`attention.op`), the operator takes and returns only tensors and numbers.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

from functools import partial

import torch
from torch import Tensor

from sympow.kernels.attention.backward import prepare
from sympow.kernels.attention.tiles import Tiles
from sympow.kernels.common import Documents, sums_to_end
from sympow.kernels.device_limits import KIB, Limits, first_fitting, limits_of
from sympow.kernels.launch import block_dim
from sympow.kernels.operator import operator
from sympow.kernels.pair_gates.backward import KeyStates, QueryStates, key_gradient, query_gradient
from sympow.kernels.pair_gates.decays import (
    BLOCK,
    LARGEST_TILE,
    decay_keys,
    decay_queries,
    decay_tables,
)
from sympow.kernels.pair_gates.forward import attend
from sympow.kernels.pair_gates.gate_gradient import crossing_sums, gate_gradient
from sympow.kernels.pair_gates.neighbours import finish_gradients, neighbour_scores
from sympow.kernels.pair_gates.states import chunk_decays, scan_pairs
from sympow.kernels.running_sums import drift_spacing
from sympow.kernels.states.quadratic import ChunkStates, QueryTerms, chunk_sums, update

# Tiles for heads of up to 64 and above, each with those of an H200 first, as in `attention.op`.
NARROW = (
    # With at most 168 registers per thread, three CTAs of 128 threads fit on a multiprocessor.
    Tiles(shared_memory=64 * KIB, asynchronous=True, query={"registers": 168}),
    Tiles(shared_memory=52 * KIB, forward={"warps": 8}, key={"warps": 8}),
)
WIDE = (
    Tiles(
        shared_memory=144 * KIB,
        asynchronous=True,
        states={"entries": 1, "stages": 2},
        forward={"warps": 8, "stages": 2},
        query={"rows": 128, "warps": 8},
    ),
    Tiles(
        shared_memory=96 * KIB,
        states={"entries": 1, "stages": 2},
        forward={"rows": 64, "warps": 8, "stages": 2},
        query={"warps": 8},
        key={"warps": 8},
    ),
    Tiles(
        shared_memory=64 * KIB,
        states={"entries": 1, "stages": 1},
        forward={"rows": 64, "warps": 8, "stages": 1},
        query={"warps": 8, "stages": 1},
        key={"warps": 8, "stages": 1},
    ),
)


def pair_tiles_for(x: Tensor) -> Tiles:
    """The tiles for heads like those of x (…, d), keys and values alike, on its device."""
    return choose_pair_tiles(x.shape[-1], limits_of(x))


def choose_pair_tiles(dim: int, limits: Limits) -> Tiles:
    """The tiles for heads of `dim` entries on a GPU with these limits."""
    return first_fitting(WIDE if dim > 64 else NARROW, limits)


@operator("sympow::attend_pairs")
def fused_pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    document_start: Tensor | None,
    document_end: Tensor | None,
    power: int,
    chunk: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The attention or chunked form (p = 2). Returns y (b, t, h, e); the rows' denominators (b, h, t) for queries
    scaled by `attention.op.query_scales`; and for the backward pass the scores within blocks, the states (first_half,
    second_half and normalizer of `ChunkStates`), and φ(q) Z of each row's state, (b, h, t) float32. The last four are
    None if there is only one chunk, as in the attention form.

    Args:
        q, k, v: as in `sympow.attention`, already rotated, all with the same head dimension, a power of two from 16 on.
        log_gamma: one gate per pair, closed between documents, (b, t, h_kv, n) float32; pairs from n on have no gate.
        document_start, document_end: as in `common.Documents`, or None.
        power: p = 2.
        chunk: tokens per chunk, a multiple of 128; 0: the attention form.
        needs_grad: whether the backward pass will run, which needs all d² features of the states.
    """
    _check(q, v, power)
    log_gamma = log_gamma.contiguous()
    tables = decay_tables(log_gamma, q.shape[-1], power)
    tiles, states, q_since = pair_tiles_for(q), None, None
    neighbours, q_near = neighbour_scores(q, k, log_gamma, power)
    if chunk and q.shape[1] > chunk:
        across, since, until = chunk_decays(tables, chunk)
        near, far, k_until = decay_keys(k, log_gamma, tables, power, until)
        _, _, q_since, _ = decay_queries(q, log_gamma, tables, power, since)
        assert k_until is not None
        chunks = chunk_sums(
            k_until, v, k.shape[2], None, chunk, full=needs_grad, update=partial(update, **tiles.states)
        )
        assert chunks is not None
        states, _ = scan_pairs(chunks, across)
    else:
        near, far, _ = decay_keys(k, log_gamma, tables, power)
    documents = _documents(document_start, document_end)
    y, denominator, state_share = attend(
        q_near, near, far, v, neighbours, tables, states=states, since=q_since, documents=documents, **tiles.forward
    )
    kept = (None,) * 4 if states is None else (states.first_half, states.second_half, states.normalizer, state_share)
    return y.contiguous(), denominator, neighbours, *kept


@fused_pair_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    document_start: Tensor | None,
    document_end: Tensor | None,
    power: int,
    chunk: int,
    needs_grad: bool,
) -> tuple[Tensor | None, ...]:
    batch, length, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    padded = -(-length // LARGEST_TILE) * LARGEST_TILE
    first_half = second_half = normalizer = state_share = None
    if chunk and length > chunk:
        count = -(-length // chunk) - 1
        first_half = q.new_empty(batch, kv_heads, count, dim // 2, value_dim, dim)
        second_half = q.new_empty(batch, kv_heads, count, dim // 2, value_dim, dim if needs_grad else dim // 2)
        normalizer = q.new_empty(batch, kv_heads, count, dim, dim)
        state_share = q.new_empty(batch, heads, length, dtype=torch.float32)
    return (
        q.new_empty(batch, length, heads, value_dim),
        q.new_empty(batch, heads, length, dtype=torch.float32),
        q.new_empty(batch, heads, BLOCK, padded, dtype=torch.float32),
        *(first_half, second_half, normalizer, state_share),
    )


@operator("sympow::attend_pairs_backward")
def _attend_pairs_backward(
    dy: Tensor,
    d_denominator: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    y: Tensor,
    denominator: Tensor,
    neighbours: Tensor,
    saved: list[Tensor | None],
    document_start: Tensor | None,
    document_end: Tensor | None,
    power: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d log γ.

    Args:
        dy, d_denominator: gradients of y and of the rows' denominators that `sympow::attend_pairs` returned.
        saved: the outputs first_half, second_half, normalizer and state_share of `sympow::attend_pairs`.
        the rest: inputs and outputs of `sympow::attend_pairs`.
    """
    tiles, length = pair_tiles_for(q), q.shape[1]
    documents = _documents(document_start, document_end)
    log_gamma = log_gamma.contiguous()
    # Recomputed: saving these tables and the decayed tokens would double the memory for queries and keys in training.
    tables = decay_tables(log_gamma, q.shape[-1], power)
    divided, minus_delta = prepare(y, dy, denominator, d_denominator)
    first_half, second_half, normalizer, state_share = saved
    states = None
    if first_half is not None and second_half is not None and normalizer is not None:
        states = ChunkStates(first_half, second_half, normalizer, chunk)
    across = since = until = read = exact = None
    if states is not None:
        across, since, until = chunk_decays(tables, chunk)
    q_near, q_far, q_since, scale = decay_queries(q, log_gamma, tables, power, since)
    near, far, k_until = decay_keys(k, log_gamma, tables, power, until)
    if states is not None and since is not None and q_since is not None and state_share is not None:
        read = QueryStates(states, q_since, since, state_share)
    query_part, weights = query_gradient(
        q_near, near, far, v, divided, minus_delta, neighbours, tables, chunked=read, documents=documents, **tiles.query
    )
    spacing = drift_spacing(length)
    key_states = None
    if read is not None and across is not None and until is not None and k_until is not None:
        chunks = chunk_sums(
            read.tokens, divided, k.shape[2], None, chunk, full=True, queries=QueryTerms(minus_delta, read.state_share),
            update=partial(update, **tiles.states),
        )  # fmt: skip
        assert chunks is not None
        gradients, exact = scan_pairs(chunks, across, read.states)
        key_states, spacing = KeyStates(gradients, k_until, until), chunk
    key_part, dv, crossing = key_gradient(
        near, v, q_near, q_far, divided, minus_delta, neighbours, tables, chunked=key_states,
        documents=documents, spacing=spacing if key_states is None and length > spacing else 0, **tiles.key,
    )  # fmt: skip
    if crossing is not None:
        exact = crossing_sums(crossing, spacing)
    exact = None if exact is None else power * exact
    dq, dk, terms, totals = finish_gradients(q, k, log_gamma, scale, weights, query_part, key_part, power)
    d_log_gamma = gate_gradient(terms, totals, exact, spacing, power, log_gamma.shape[-1])
    if document_end is not None:
        # The gradient of a gate sums over the rest of its own document.
        d_log_gamma = sums_to_end(d_log_gamma.movedim(1, -1), document_end).movedim(-1, 1)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_log_gamma.contiguous()


@_attend_pairs_backward.register_fake
def _(
    dy: Tensor,
    d_denominator: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    *rest: object,
) -> tuple[Tensor, ...]:
    contiguous = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return (*contiguous, log_gamma.new_empty(log_gamma.shape, dtype=torch.float32))


def _save(ctx, inputs, output) -> None:
    q, k, v, log_gamma, document_start, document_end, power, chunk, _ = inputs
    y, denominator, *rest = output
    ctx.save_for_backward(q, k, v, log_gamma, y, denominator, document_start, document_end, *rest)
    ctx.power, ctx.chunk = power, chunk
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for x in rest if x is not None))


def _differentiate(ctx, dy, d_denominator, *_):
    q, k, v, log_gamma, y, denominator, document_start, document_end, neighbours, *saved = ctx.saved_tensors
    # A loss may depend on some of the outputs only.
    dy = torch.zeros_like(y) if dy is None else dy
    d_denominator = None if d_denominator is None else d_denominator.contiguous()
    gradients = _attend_pairs_backward(
        dy,
        d_denominator,
        q,
        k,
        v,
        log_gamma,
        y,
        denominator,
        neighbours,
        saved,
        document_start,
        document_end,
        ctx.power,
        ctx.chunk,
    )
    return (*gradients, None, None, None, None, None)


fused_pair_attention.register_gradient(_save, _differentiate)


def _check(q: Tensor, v: Tensor, power: int) -> None:
    assert power == 2 and q.shape[-1] == v.shape[-1] == block_dim(q.shape[-1])


def _documents(start: Tensor | None, end: Tensor | None) -> Documents | None:
    return None if start is None or end is None else Documents(start, end)
