"""Attention to earlier chunks for p = 4, as a PyTorch operator: for autograd, torch.compile and opcheck.

Only the inputs are saved for the backward pass: states of p = 4 are large, and are recomputed. Features and states
exist for one block of sequences and heads at a time, in at most `SCRATCH_BYTES` unless a single head needs more.
`sympow.kernels.states.reference.past_attention_reference` is the plain PyTorch reference.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.errors import ArgumentError
from sympow.kernels.common import EPSILON, STATE_EPSILON
from sympow.kernels.device_limits import QUARTIC_DIMS, QUARTIC_VALUE_DIMS, limits_of
from sympow.kernels.launch import rows_contiguous
from sympow.kernels.operator import operator
from sympow.kernels.running_sums import gate_sums
from sympow.kernels.states.quartic import chunk_states, overlap
from sympow.kernels.states.quartic_features import (
    NORMALIZER_PAIRS,
    ROWS,
    PairFeatures,
    PairGradients,
    PairLists,
    StateLayout,
    Tiles,
    inner_columns,
    outer_columns,
    pair_features,
    pair_lists,
    pull_back,
    quartic_tiles_for,
    state_layout,
)
from sympow.kernels.states.quartic_query import inner_gradient, outer_gradient, read_quartic_states

POWER = 4
CHUNK_UNIT = 128
# Upper bound of features, states and their gradients that exist at once.
SCRATCH_BYTES = 1 << 30


@operator("sympow::quartic_past")
def past_attention(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, power: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j B_ij v_j (b, t, h, e) and Σ_j B_ij (b, h, t) over the keys j of earlier chunks than i's, both float32, and
    whether each row sees its state, (b, h, t) bool.

    B_ij = exp(G_i − G_j) (q_i · k_j)^4 with G the running sum of log γ. Differentiable in all tensors.

    Args:
        q: queries of bounded length, (b, t, h, d), d 16 or 32.
        k: keys, (b, t, h_kv, d).
        v: values, (b, t, h_kv, e), e 16, 32, 64 or 128.
        log_gamma: (b, t, h_kv), −inf for a closed gate; None: no gates.
        power: 4.
        chunk: tokens per chunk, a multiple of 128.
    """
    _check(q, k, v, power, chunk)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, length, heads, _ = q.shape
    numerator = q.new_empty(batch, length, heads, v.shape[-1], dtype=torch.float32)
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    numerator[:, :chunk].zero_()
    denominator[:, :, :chunk].zero_()
    sees_state = torch.ones_like(denominator, dtype=torch.bool)
    if length <= chunk:
        return numerator, denominator, sees_state
    magnitude = torch.empty_like(denominator)
    plan = _plan(q, k, v, log_gamma, chunk)
    end = plan.state_count * chunk
    for block in _head_blocks(q, k, v, chunk, tensors=1):
        keys, values = block.keys(k)[:, :end], block.keys(v)[:, :end]
        past = _sum_states(_features(keys, 0, block, plan), values, _ones(values), block, plan)
        x = _features(block.queries(q)[:, chunk:], chunk, block, plan)
        where, tiles = plan.where(block), plan.tiles
        read_quartic_states(x, past.kv, *where, plan.layout, block.queries(numerator)[:, chunk:], **tiles.query)
        rows = block.queries(denominator.transpose(1, 2).unsqueeze(-1))[:, chunk:]
        outer_gradient(x, past.normalizer, *where, plan.normalizer_layout, result=rows, **tiles.outer)
        # |φ(x)| |Z|: features of absolute values are the absolute values of features.
        sizes, rows = PairFeatures(x.inner.abs(), x.outer.abs()), block.queries(magnitude.transpose(1, 2).unsqueeze(-1))
        outer_gradient(
            sizes, past.normalizer.abs(), *where, plan.normalizer_layout, result=rows[:, chunk:], **tiles.outer
        )
        del past, x, sizes  # before the next block allocates its own
    # As for p = 2: where φ(q) Z is indistinguishable from rounding, a row does not see its state. NaN stays visible.
    epsilon = (STATE_EPSILON if q.dtype == torch.bfloat16 else EPSILON).value
    sees_state[:, :, chunk:] = ~(denominator[:, :, chunk:] < epsilon * magnitude[:, :, chunk:])
    denominator.masked_fill_(~sees_state, 0.0)
    numerator.masked_fill_(~sees_state.transpose(1, 2).unsqueeze(-1), 0.0)
    return numerator, denominator, sees_state


@past_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, power: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    numerator = q.new_empty(batch, length, heads, v.shape[-1], dtype=torch.float32)
    denominator = q.new_empty(batch, heads, length, dtype=torch.float32)
    return numerator, denominator, torch.empty_like(denominator, dtype=torch.bool)


@operator("sympow::quartic_past_backward")
def _past_backward(
    d_numerator: Tensor, d_denominator: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d log γ (empty without gates)."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, length, heads, _ = q.shape
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    rows = q.new_zeros(batch, heads, length, dtype=torch.float32)
    columns = q.new_zeros(batch, k.shape[2], length, dtype=torch.float32)
    spanning = rows.new_zeros(batch, k.shape[2], -(-length // chunk), dtype=torch.float64)
    sums = None
    if length > chunk:
        plan = _plan(q, k, v, log_gamma, chunk)
        sums = plan.sums
        end = plan.state_count * chunk
        for block in _head_blocks(q, k, v, chunk, tensors=2):
            queries = block.queries(q)[:, chunk:]
            g = rows_contiguous(block.queries(d_numerator)[:, chunk:].to(q.dtype))
            g_one = block.queries(d_denominator.transpose(1, 2))[:, chunk:].to(q.dtype).unsqueeze(-1).contiguous()
            x = _features(queries, chunk, block, plan)
            keys, values = block.keys(k)[:, :end], block.keys(v)[:, :end]
            past = _sum_states(_features(keys, 0, block, plan), values, _ones(values), block, plan)
            gradient = _feature_gradient(x, g, g_one, past, block, plan)
            _pull_back(queries, gradient, chunk, block, plan, block.queries(dq)[:, chunk:], block.query_rows(rows))
            del gradient
            future = _sum_states(x, g, g_one, block, plan, reverse=True)
            if log_gamma is not None and plan.state_count > 1:
                across = overlap(past.kv, future.kv, plan.state_count, plan.layout)
                across += overlap(past.normalizer, future.normalizer, plan.state_count, plan.normalizer_layout)
                block.key_rows(spanning)[:, :, 1:-1] = across.view(-1, block.kv_heads, plan.state_count - 1)
            del x, g, g_one, past
            x = _features(keys, 0, block, plan)
            result = block.keys(dv)[:, :end]
            gradient = _feature_gradient(x, values, _ones(values), future, block, plan, result)
            _pull_back(keys, gradient, 0, block, plan, block.keys(dk)[:, :end], block.key_rows(columns))
            del x, gradient, future
    d_log_gamma = rows.new_empty(0) if log_gamma is None else _gate_gradient(rows, columns, spanning, sums, chunk)
    return dq, dk, dv, d_log_gamma


@_past_backward.register_fake
def _(
    d_numerator: Tensor, d_denominator: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty((0,) if log_gamma is None else log_gamma.shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    q, k, v, log_gamma, _, chunk = inputs
    ctx.save_for_backward(q, k, v, log_gamma, output[2])
    ctx.chunk = chunk
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, d_numerator, d_denominator, _):
    *saved, sees_state = ctx.saved_tensors
    log_gamma = saved[3]
    d_denominator = d_denominator.masked_fill(~sees_state, 0.0)
    d_numerator = d_numerator.masked_fill(~sees_state.transpose(1, 2).unsqueeze(-1), 0.0)
    dq, dk, dv, d_log_gamma = _past_backward(d_numerator, d_denominator, *saved, ctx.chunk)
    return dq, dk, dv, None if log_gamma is None else d_log_gamma.to(log_gamma.dtype), None, None


past_attention.register_gradient(_save, _differentiate)


def _check(q: Tensor, k: Tensor, v: Tensor, power: int, chunk: int) -> None:
    if power != POWER:
        raise ArgumentError("power", f"must be {POWER}, got {power}")
    if chunk < 1 or chunk % CHUNK_UNIT:
        raise ArgumentError("chunk", f"must be a positive multiple of {CHUNK_UNIT}, got {chunk}")
    if q.shape[-1] not in QUARTIC_DIMS or k.shape[-1] != q.shape[-1]:
        raise ArgumentError(
            "q", f"and k must have heads of {QUARTIC_DIMS} entries alike, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if v.shape[-1] not in QUARTIC_VALUE_DIMS:
        raise ArgumentError("v", f"must have heads of {QUARTIC_VALUE_DIMS} entries, got {v.shape[-1]}")
    if q.shape[2] % k.shape[2] or v.shape[2] != k.shape[2]:
        raise ArgumentError(
            "k",
            f"and v must have as many heads as each other, and q a multiple of it: got {q.shape[2]} heads of q, "
            f"{k.shape[2]} of k and {v.shape[2]} of v",
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ArgumentError("q", f", k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")


@dataclass(frozen=True)
class _Plan:
    """What all blocks of heads share: G (b, h_kv, t) or None, the features' layout, chunks."""

    sums: Tensor | None
    lists: PairLists
    layout: StateLayout
    normalizer_layout: StateLayout
    tiles: Tiles
    chunk: int
    state_count: int

    def where(self, block: "_HeadBlock") -> tuple[int, int]:
        return block.kv_heads, self.chunk


@dataclass(frozen=True)
class _HeadBlock:
    """Some sequences of the batch and some key heads, with the query heads that read them."""

    batch: slice
    heads: slice
    group: int

    @property
    def kv_heads(self) -> int:
        return self.heads.stop - self.heads.start

    def keys(self, x: Tensor) -> Tensor:
        """Its block of x (b, t, h_kv, …)."""
        return x[self.batch, :, self.heads]

    def queries(self, x: Tensor) -> Tensor:
        """Its block of x (b, t, h, …)."""
        return x[self.batch, :, self.heads.start * self.group : self.heads.stop * self.group]

    def key_rows(self, x: Tensor) -> Tensor:
        """Its block of x (b, h_kv, t)."""
        return x[self.batch, self.heads]

    def query_rows(self, x: Tensor) -> Tensor:
        """Its block of x (b, h, t)."""
        return x[self.batch, self.heads.start * self.group : self.heads.stop * self.group]

    def sums(self, plan: _Plan) -> Tensor | None:
        return None if plan.sums is None else self.key_rows(plan.sums).contiguous()


@dataclass(frozen=True)
class _States:
    kv: Tensor
    normalizer: Tensor


def _plan(q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, chunk: int) -> _Plan:
    dim = q.shape[-1]
    return _Plan(
        sums=None if log_gamma is None else gate_sums(log_gamma).sums,
        lists=pair_lists(dim, q.device),
        layout=state_layout(dim, _pairs(q, v), q.device),
        normalizer_layout=state_layout(dim, NORMALIZER_PAIRS, q.device),
        tiles=quartic_tiles_for(dim, v.shape[-1], limits_of(q), q.dtype),
        chunk=chunk,
        state_count=-(-q.shape[1] // chunk) - 1,
    )


def _pairs(q: Tensor, v: Tensor) -> int:
    """Outer pairs per block."""
    value_dim = v.shape[-1]
    return max(1, quartic_tiles_for(q.shape[-1], value_dim, limits_of(q), q.dtype).width // value_dim)


def _head_blocks(q: Tensor, k: Tensor, v: Tensor, chunk: int, tensors: int) -> Iterator[_HeadBlock]:
    """Blocks whose features and states fit in `SCRATCH_BYTES`; `tensors`: how many of each exist at once."""
    batch, kv_heads = q.shape[0], k.shape[2]
    together = max(1, SCRATCH_BYTES // (tensors * _sequence_bytes(q, v, chunk)))
    sequences = max(1, together // kv_heads)
    head_step = min(kv_heads, together)
    for start in range(0, batch, sequences):
        for head in range(0, kv_heads, head_step):
            stop = min(head + head_step, kv_heads)
            yield _HeadBlock(slice(start, min(start + sequences, batch)), slice(head, stop), q.shape[2] // kv_heads)


def _sequence_bytes(q: Tensor, v: Tensor, chunk: int) -> int:
    """Features of queries and keys, and states, of one key head of one sequence."""
    length, heads, dim = q.shape[1:]
    kv_heads, value_dim = v.shape[2:]
    layout = state_layout(dim, _pairs(q, v), q.device)
    features = (heads // kv_heads + 1) * length * (inner_columns(dim) + outer_columns(dim))
    states = (-(-length // chunk) - 1) * layout.rows * layout.pairs * (value_dim + 1)
    return (features + states) * q.element_size()


def _features(x: Tensor, first_token: int, block: _HeadBlock, plan: _Plan) -> PairFeatures:
    return pair_features(x, block.sums(plan), first_token, block.kv_heads, plan.chunk, plan.lists)


def _sum_states(
    x: PairFeatures, y: Tensor, y_one: Tensor, block: _HeadBlock, plan: _Plan, reverse: bool = False
) -> _States:
    """States of features x and values y at the ends of all chunks but the last; reverse: of queries x and output
    gradients y, over the tokens after each end."""
    where = (block.kv_heads, block.sums(plan), plan.chunk)
    kv = chunk_states(x, _transposed(y), *where, plan.layout, reverse=reverse, **plan.tiles.update)
    normalizer = chunk_states(
        x, _transposed(y_one), *where, plan.normalizer_layout, reverse=reverse, **plan.tiles.update
    )
    return _States(kv, normalizer)


def _feature_gradient(
    x: PairFeatures,
    g: Tensor,
    g_one: Tensor,
    states: _States,
    block: _HeadBlock,
    plan: _Plan,
    result: Tensor | None = None,
) -> PairGradients:
    """Gradients of the pair features of x; also φ(x) S, into `result`."""
    where, tiles, d_outer = plan.where(block), plan.tiles.outer, torch.empty_like(x.outer)
    outer_gradient(x, states.normalizer, *where, plan.normalizer_layout, g=g_one, d_outer=d_outer, **tiles)
    outer_gradient(x, states.kv, *where, plan.layout, result=result, g=g, d_outer=d_outer, add=True, **tiles)
    layouts = (plan.layout, plan.normalizer_layout)
    d_inner = inner_gradient(x, g, g_one, states.kv, states.normalizer, *where, *layouts, **plan.tiles.inner)
    return PairGradients(d_inner, d_outer)


def _pull_back(
    x: Tensor, gradient: PairGradients, first_token: int, block: _HeadBlock, plan: _Plan, dx: Tensor, rows: Tensor
) -> None:
    terms = rows[:, :, first_token:]
    pull_back(x, gradient, block.sums(plan), first_token, block.kv_heads, plan.chunk, plan.lists, dx, terms)


def _transposed(y: Tensor) -> Tensor:
    """y (b, t, h, e) as (b, h, e, t), t padded with zeros as that of features is."""
    return pad(y.permute(0, 2, 3, 1), (0, -y.shape[1] % ROWS)).contiguous()


def _gate_gradient(rows: Tensor, columns: Tensor, spanning: Tensor, sums: Tensor | None, chunk: int) -> Tensor:
    """d log γ_m = Σ_{j<m≤i} B_ij dB_ij, (b, t, h_kv) float32.

    The pairs (i, j) across a token m have i in its chunk, or j, or neither. The sums over pairs with a given i, or j,
    follow from homogeneity, as in `running_sums.gate_gradient`. But that takes differences of sums over the whole
    sequence, whose rounding exceeds the gradients of strong gates; here nothing cancels.

    Args:
        rows: q · dq, (b, h, t).
        columns: k · dk, (b, h_kv, t).
        spanning: sums over the pairs with j before a chunk and i after it, without the decay of the chunk,
            (b, h_kv, chunks) float64.
        sums: G, (b, h_kv, t) float64; None if there is only one chunk.
    """
    kv_heads, length = columns.shape[1:]
    per_row = rows.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float64)
    per_row, per_column = (
        pad(x.double(), (0, -length % chunk)).unflatten(2, (-1, chunk)) / POWER for x in (per_row, columns)
    )
    from_here = per_row.flip(3).cumsum(3).flip(3)
    until_here = per_column.cumsum(3) - per_column
    if sums is not None:
        ends = sums[:, :, chunk - 1 :: chunk]
        spanning = spanning * pad(ends[:, :, 1:] - ends[:, :, :-1], (1, spanning.shape[2] - ends.shape[2])).exp()
    gradient = from_here + until_here + spanning.unsqueeze(-1)
    return gradient.flatten(2)[:, :, :length].transpose(1, 2).to(torch.float32).contiguous()


def _ones(values: Tensor) -> Tensor:
    return values.new_ones(*values.shape[:3], 1)
