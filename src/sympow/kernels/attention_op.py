"""Attention on the kernels as a PyTorch operator: visible to autograd, torch.compile and torch.library.opcheck.

An operator's outputs are tensors and nothing else, so what is missing (gates, states) is an empty tensor here.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.attention_backward import key_gradient, prepare, query_gradient
from sympow.kernels.attention_forward import attend
from sympow.kernels.chunk_states import ChunkStates, chunk_states
from sympow.kernels.gates import SCAN_BLOCK, Gates, gate_gradient, running_sums
from sympow.kernels.scaling import scale_queries
from sympow.kernels.tiles import COLUMNS, tiles_for


@torch.library.custom_op("sympow::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, power: int, chunk: int, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, h, e), the rows' weights, and what the backward pass reads: gates and states.

    Args:
        q, k, v, log_gamma: as in `sympow.attention`, already rotated; one gate per head.
        power: p.
        chunk: tokens between two states of the chunked form; 0: the attention form.
        train: whether the backward pass will be run, which needs states in full.
    """
    tiles = tiles_for(q.shape[-1])
    gates = None if log_gamma is None else running_sums(log_gamma, COLUMNS)
    states = None
    if chunk:
        sums = gates.sums if gates else None
        states = chunk_states(k, v, k.shape[2], sums, chunk, full=train, **tiles.states)
    y, weight = attend(q, k, v, power, gates, states, **tiles.forward)
    return (y.contiguous(), weight, *_gate_tensors(gates, q), *_state_tensors(states, q))


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, power: int, chunk: int, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    y = q.new_empty(batch, length, heads, value_dim)
    weight = q.new_empty(batch, heads, length, dtype=torch.float32)
    sums = to_end = from_start = low = high = normalizer = None
    if log_gamma is not None:
        padded = -(-length // SCAN_BLOCK) * SCAN_BLOCK
        sums = q.new_empty(batch, kv_heads, length, dtype=torch.float64)
        to_end = q.new_empty(batch, kv_heads, padded, dtype=torch.float32)
        from_start = torch.empty_like(to_end)
    slots = -(-length // chunk) - 1 if chunk else 0
    if slots:
        low = q.new_empty(batch, kv_heads, slots, dim // 2, value_dim, dim)
        high = q.new_empty(batch, kv_heads, slots, dim // 2, value_dim, dim if train else dim // 2)
        normalizer = q.new_empty(batch, kv_heads, slots, dim, dim)
    rest = (sums, to_end, from_start, low, high, normalizer)
    return (y, weight, *(q.new_empty(0) if x is None else x for x in rest))  # type: ignore[return-value]


@torch.library.custom_op("sympow::attend_backward", mutates_args=())
def _attend_backward(
    dy: Tensor,
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
    power: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d log γ (empty without gates), from what `sympow::attend` returned."""
    tiles = tiles_for(q.shape[-1])
    gates = Gates(sums, to_end, from_start, COLUMNS) if sums.numel() else None
    states = ChunkStates(low, high, normalizer, chunk) if low.numel() else None
    q, scale = scale_queries(q)
    divided, minus_delta = prepare(y, dy, weight)
    dq, rows = query_gradient(q, scale, k, v, divided, minus_delta, power, gates, states, **tiles.query)
    reverse = None
    if states is not None:
        reverse = chunk_states(
            q, divided, k.shape[2], gates.sums if gates else None, chunk,
            full=True, factor=minus_delta, reverse=True, **tiles.states,
        )  # fmt: skip
    dk, dv, columns = key_gradient(q, k, v, divided, minus_delta, power, gates, reverse, **tiles.key)
    d_log_gamma = q.new_empty(0, dtype=torch.float32) if gates is None else gate_gradient(rows, columns, power)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_log_gamma


@_attend_backward.register_fake
def _(
    dy: Tensor,
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
    power: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    gates = (k.shape[0], k.shape[1], k.shape[2]) if sums.numel() else (0,)
    return (
        torch.empty_like(q, memory_format=contiguous),
        torch.empty_like(k, memory_format=contiguous),
        torch.empty_like(v, memory_format=contiguous),
        q.new_empty(gates, dtype=torch.float32),
    )


def _save_attend(ctx, inputs, output) -> None:
    q, k, v, log_gamma, power, chunk, _ = inputs
    y, weight, *rest = output
    ctx.save_for_backward(q, k, v, y, weight, *rest)
    ctx.power, ctx.chunk = power, chunk
    ctx.gate_dtype = None if log_gamma is None else log_gamma.dtype
    ctx.mark_non_differentiable(weight, *rest)


def _differentiate_attend(ctx, dy, *_):
    dq, dk, dv, d_log_gamma = _attend_backward(dy, *ctx.saved_tensors, ctx.power, ctx.chunk)
    return dq, dk, dv, None if ctx.gate_dtype is None else d_log_gamma.to(ctx.gate_dtype), None, None, None


_attend.register_autograd(_differentiate_attend, setup_context=_save_attend)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, power: int, chunk: int, *, train: bool
) -> tuple[Tensor, Tensor]:
    """y (b, t, h, e) for rotated queries and keys, and the sums of weights (b, h, t); chunk 0: the attention form.

    The weights are those of `scaled_queries`, and constants to autograd.
    """
    y, weight, *_ = _attend(q, k, v, log_gamma, power, chunk, train)
    return y, weight


@torch.library.custom_op("sympow::scaled_queries", mutates_args=())
def scaled_queries(q: Tensor) -> Tensor:
    """q times the power of two per row that the kernels scale it by: (b, t, h, d)."""
    return scale_queries(q)[0].contiguous()


@scaled_queries.register_fake
def _(q: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _gate_tensors(gates: Gates | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if gates is None:
        return like.new_empty(0), like.new_empty(0), like.new_empty(0)
    return gates.sums, gates.to_end, gates.from_start


def _state_tensors(states: ChunkStates | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if states is None:
        return like.new_empty(0), like.new_empty(0), like.new_empty(0)
    return states.low, states.high, states.normalizer
