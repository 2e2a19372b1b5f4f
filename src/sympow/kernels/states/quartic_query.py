"""Queries of the states of p = 4, and the gradients of the products of two entries that they are made of.

With features x_m (inner pairs, decayed) and x_o (outer pairs) of a token, its state S and a gradient g,
    φ(x) S = Σ_o x_o (Σ_m x_m S_mo)    d x_o = g · (Σ_m x_m S_mo)    d x_m = Σ_o x_o (g · S_mo).
`query_kernel` and `inner_gradient_kernel` multiply x_m x_o and x_o g_e, left operands computed in registers, by S.
`outer_gradient_kernel` computes the sum in parentheses for a block of outer pairs and contracts it with g; also with
x_o, where φ(x) S is wanted too, or where the value dimension is too small for `query_kernel` (denominators).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import dot_precision, split_program_id, wait_for_mma
from sympow.kernels.device_limits import register_limit
from sympow.kernels.launch import blocks_of, ceil_div, flat_grid, launch
from sympow.kernels.states.quartic_features import COLUMNS, ROWS, PairFeatures, StateLayout


@triton.jit
def query_kernel(
    inner_desc, states_desc, outer_ptr, result_ptr, tile_column_ptr, tile_block_ptr,
    result_stride_b, result_stride_t, result_stride_h, length, padded, heads, state_count, chunk, tiles, outer_columns,
    GROUP: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """φ(x) S for a tile of tokens."""
    token_tile, sequence = split_program_id(padded // ROWS, tl.int32)
    first = token_tile * ROWS
    batch, head = sequence // heads, sequence % heads
    state_index = (batch * (heads // GROUP) + head // GROUP) * state_count + first // chunk
    tokens = first + tl.arange(0, ROWS)
    outer_ptr += sequence.to(tl.int64) * outer_columns * padded + tokens[:, None]
    acc = tl.zeros((ROWS, E), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        column, block = tl.load(tile_column_ptr + tile), tl.load(tile_block_ptr + tile)
        inner = inner_desc.load([sequence, first, column]).reshape(ROWS, COLUMNS)
        outer = tl.load(outer_ptr + (block * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)[None, :] * padded)
        left = tl.reshape(inner[:, :, None] * outer[:, None, :], (ROWS, COLUMNS * PAIRS))
        state = states_desc.load([state_index, tile * (COLUMNS * PAIRS), 0]).reshape(COLUMNS * PAIRS, E)
        acc = wait_for_mma(tl.dot(left, state, acc, input_precision=PRECISION))
    rows = batch.to(tl.int64) * result_stride_b + head.to(tl.int64) * result_stride_h
    rows += tokens.to(tl.int64) * result_stride_t
    out = result_ptr + rows[:, None] + tl.arange(0, E)[None, :]
    tl.store(out, acc.to(result_ptr.dtype.element_ty), mask=(tokens < length)[:, None])


@triton.jit
def outer_gradient_kernel(
    inner_desc, states_desc, outer_ptr, g_ptr, result_ptr, d_outer_ptr, tile_column_ptr,
    g_stride_b, g_stride_t, g_stride_h, result_stride_b, result_stride_t, result_stride_h,
    length, padded, heads, state_count, chunk, tiles, inner_columns, outer_columns,
    GROUP: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WITH_RESULT: tl.constexpr, WITH_GRADIENT: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """d x_o for a tile of tokens, and φ(x) S; ADD: to what d_outer holds already."""
    token_tile, sequence = split_program_id(padded // ROWS, tl.int32)
    first = token_tile * ROWS
    batch, head = sequence // heads, sequence % heads
    state_index = (batch * (heads // GROUP) + head // GROUP) * state_count + first // chunk
    tokens = first + tl.arange(0, ROWS)
    present = (tokens < length)[:, None]
    values = tl.arange(0, E)[None, :]
    outer_ptr += sequence.to(tl.int64) * outer_columns * padded + tokens[:, None]
    if WITH_GRADIENT:
        d_outer_ptr += sequence.to(tl.int64) * outer_columns * padded + tokens[:, None]
        g_rows = batch.to(tl.int64) * g_stride_b + head.to(tl.int64) * g_stride_h + tokens.to(tl.int64) * g_stride_t
        g = tl.load(g_ptr + g_rows[:, None] + values, mask=present, other=0.0).to(tl.float32)
    result = tl.zeros((ROWS, E), tl.float32)
    acc = tl.zeros((ROWS, PAIRS * E), tl.float32)
    block = 0
    # One loop over all tiles, not one for each block, so that loads are pipelined across blocks.
    for tile in tl.range(0, tiles, num_stages=STAGES):
        column = tl.load(tile_column_ptr + tile)
        inner = inner_desc.load([sequence, first, column]).reshape(ROWS, COLUMNS)
        state = states_desc.load([state_index, tile * COLUMNS, 0]).reshape(COLUMNS, PAIRS * E)
        acc = tl.dot(inner, state, acc, input_precision=PRECISION)
        if column + COLUMNS == inner_columns:
            by_pair = tl.reshape(acc, (ROWS, PAIRS, E))
            pairs = (block * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)[None, :] * padded
            if WITH_RESULT:
                outer = tl.load(outer_ptr + pairs).to(tl.float32)
                result += tl.sum(by_pair * outer[:, :, None], axis=1)
            if WITH_GRADIENT:
                d_outer = tl.sum(by_pair * g[:, None, :], axis=2)
                if ADD:
                    d_outer += tl.load(d_outer_ptr + pairs).to(tl.float32)
                tl.store(d_outer_ptr + pairs, d_outer.to(d_outer_ptr.dtype.element_ty))
            acc = tl.zeros((ROWS, PAIRS * E), tl.float32)
            block += 1
    if WITH_RESULT:
        rows = batch.to(tl.int64) * result_stride_b + head.to(tl.int64) * result_stride_h
        rows += tokens.to(tl.int64) * result_stride_t
        tl.store(result_ptr + rows[:, None] + values, result.to(result_ptr.dtype.element_ty), mask=present)


@triton.jit
def _outer_times_gradient(
    acc, outer_ptr, g, states_desc, block_tile_ptr, padded, state_index, column_tile, blocks,
    E: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """acc + Σ_o x_o (g · S_mo) for the COLUMNS inner columns m of a tile."""
    for block in tl.range(0, blocks, num_stages=STAGES):
        tile = tl.load(block_tile_ptr + block) + column_tile
        pairs = (block * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)[None, :] * padded
        outer = tl.load(outer_ptr + pairs)
        left = tl.reshape(outer[:, :, None] * g[:, None, :], (ROWS, PAIRS * E))
        state = states_desc.load([state_index, tile * COLUMNS, 0]).reshape(COLUMNS, PAIRS * E)
        acc = wait_for_mma(tl.dot(left, state.T, acc, input_precision=PRECISION))
    return acc


@triton.jit
def inner_gradient_kernel(
    outer_ptr, g_ptr, g_one_ptr, states_desc, normalizer_desc, d_inner_ptr,
    block_tile_ptr, column_blocks_ptr, normalizer_block_tile_ptr, normalizer_column_blocks_ptr,
    g_stride_b, g_stride_t, g_stride_h, g_one_stride_b, g_one_stride_t, g_one_stride_h,
    length, padded, heads, state_count, chunk, inner_columns, outer_columns,
    GROUP: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr, NORMALIZER_PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d x_m for a tile of tokens and a tile of inner columns, from numerators and denominators."""
    column_tile, rest = split_program_id(inner_columns // COLUMNS, tl.int32)
    token_tiles = padded // ROWS
    first, sequence = (rest % token_tiles) * ROWS, rest // token_tiles
    batch, head = sequence // heads, sequence % heads
    state_index = (batch * (heads // GROUP) + head // GROUP) * state_count + first // chunk
    tokens = first + tl.arange(0, ROWS)
    present = (tokens < length)[:, None]
    outer_ptr += sequence.to(tl.int64) * outer_columns * padded + tokens[:, None]
    g_rows = batch.to(tl.int64) * g_stride_b + head.to(tl.int64) * g_stride_h + tokens.to(tl.int64) * g_stride_t
    g = tl.load(g_ptr + g_rows[:, None] + tl.arange(0, E)[None, :], mask=present, other=0.0)
    g_rows = batch.to(tl.int64) * g_one_stride_b + head.to(tl.int64) * g_one_stride_h
    g_rows += tokens.to(tl.int64) * g_one_stride_t
    g_one = tl.load(g_one_ptr + g_rows[:, None], mask=present, other=0.0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc = _outer_times_gradient(
        acc, outer_ptr, g, states_desc, block_tile_ptr, padded, state_index, column_tile,
        tl.load(column_blocks_ptr + column_tile), E, PAIRS, COLUMNS, ROWS, PRECISION, STAGES,
    )  # fmt: skip
    acc = _outer_times_gradient(
        acc, outer_ptr, g_one, normalizer_desc, normalizer_block_tile_ptr, padded, state_index, column_tile,
        tl.load(normalizer_column_blocks_ptr + column_tile), 1, NORMALIZER_PAIRS, COLUMNS, ROWS, PRECISION, STAGES,
    )  # fmt: skip
    columns = (sequence.to(tl.int64) * inner_columns + column_tile * COLUMNS + tl.arange(0, COLUMNS)) * padded
    tl.store(d_inner_ptr + columns[None, :] + tokens[:, None], acc.to(d_inner_ptr.dtype.element_ty))


def read_quartic_states(
    x: PairFeatures,
    states: Tensor,
    kv_heads: int,
    chunk: int,
    layout: StateLayout,
    result: Tensor,
    *,
    warps: int = 8,
    stages: int = 3,
) -> None:
    """Writes φ(x) S to `result` (b, t, h, e) for states from `chunk_states`, e ≥ 16."""
    batch, heads, padded, _ = x.inner.shape
    value_dim = states.shape[-1] // layout.pairs
    by_feature = states.view(states.shape[0], -1, value_dim)
    launch(
        query_kernel, flat_grid(padded // ROWS, batch * heads),
        blocks_of(x.inner.flatten(0, 1), [1, ROWS, COLUMNS]),
        blocks_of(by_feature, [1, COLUMNS * layout.pairs, value_dim]),
        x.outer, result, layout.tile_column, layout.tile_block, *result.stride()[:3],
        result.shape[1], padded, heads, ceil_div(result.shape[1], chunk), chunk, layout.tiles, x.outer.shape[2],
        GROUP=heads // kv_heads, E=value_dim, PAIRS=layout.pairs, COLUMNS=COLUMNS, ROWS=ROWS,
        PRECISION=dot_precision(states.dtype), STAGES=stages, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip


def outer_gradient(
    x: PairFeatures,
    states: Tensor,
    kv_heads: int,
    chunk: int,
    layout: StateLayout,
    *,
    result: Tensor | None = None,
    g: Tensor | None = None,
    d_outer: Tensor | None = None,
    add: bool = False,
    warps: int = 8,
    stages: int = 3,
    registers: int | None = None,
) -> None:
    """Writes g · ∂(φ(x) S) / ∂x_o to `d_outer` (b, h, outer columns, ≥ t), and φ(x) S to `result` (b, t, h, e).

    Args:
        states: from `chunk_states`.
        g: gradients (b, t, h, e) that `d_outer` needs.
        add: to what `d_outer` holds.
    """
    batch, heads, padded, inner_columns = x.inner.shape
    width = states.shape[-1]
    given = g if result is None else result
    assert given is not None
    length = given.shape[1]
    empty = (0, 0, 0)
    launch(
        outer_gradient_kernel, flat_grid(padded // ROWS, batch * heads),
        blocks_of(x.inner.flatten(0, 1), [1, ROWS, COLUMNS]),
        blocks_of(states, [1, COLUMNS, width]), x.outer, g, result, d_outer, layout.tile_column,
        *(empty if g is None else g.stride()[:3]), *(empty if result is None else result.stride()[:3]),
        length, padded, heads, ceil_div(length, chunk), chunk, layout.tiles, inner_columns, x.outer.shape[2],
        GROUP=heads // kv_heads, E=width // layout.pairs, PAIRS=layout.pairs, COLUMNS=COLUMNS, ROWS=ROWS,
        WITH_RESULT=result is not None, WITH_GRADIENT=d_outer is not None, ADD=add,
        PRECISION=dot_precision(states.dtype), STAGES=stages, num_warps=warps, **register_limit(registers),
        enable_fp_fusion=True,
    )  # fmt: skip


def inner_gradient(
    x: PairFeatures,
    g: Tensor,
    g_one: Tensor,
    states: Tensor,
    normalizer: Tensor,
    kv_heads: int,
    chunk: int,
    layout: StateLayout,
    normalizer_layout: StateLayout,
    *,
    warps: int = 8,
    stages: int = 3,
) -> Tensor:
    """d x_m, (b, h, inner columns, ≥ t), from gradients g (b, t, h, e) of φ(x) S and g_one (b, t, h, 1) of φ(x) Z."""
    batch, heads, padded, inner_columns = x.inner.shape
    length = g.shape[1]
    width = states.shape[-1]
    d_inner = x.inner.new_empty(batch, heads, inner_columns, padded)
    launch(
        inner_gradient_kernel, flat_grid(inner_columns // COLUMNS, padded // ROWS, batch * heads),
        x.outer, g, g_one,
        blocks_of(states, [1, COLUMNS, width]),
        blocks_of(normalizer, [1, COLUMNS, normalizer_layout.pairs]), d_inner,
        layout.block_tile, layout.column_blocks, normalizer_layout.block_tile, normalizer_layout.column_blocks,
        *g.stride()[:3], *g_one.stride()[:3],
        length, padded, heads, ceil_div(length, chunk), chunk, inner_columns, x.outer.shape[2],
        GROUP=heads // kv_heads, E=width // layout.pairs, PAIRS=layout.pairs, NORMALIZER_PAIRS=normalizer_layout.pairs,
        COLUMNS=COLUMNS, ROWS=ROWS, PRECISION=dot_precision(states.dtype), STAGES=stages, num_warps=warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return d_inner
