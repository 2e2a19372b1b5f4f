"""States at the ends of chunks, p = 4, and the sums over later queries that their gradients need.

At the end R of each chunk but the last, with o an outer and m an inner pair of entries (`quartic_features`),
    S_mo = c_mo Σ_{j≤R} exp(G_R − G_j) k_m k_o v_j,
computed in two steps: `quartic_update_kernel` sums each chunk alone, by products of (outer pair * value), a left
operand computed in registers, with inner columns; `quartic_scan_kernel` adds up the chunks, decaying the state carried
between them, and applies the coefficients. Reversed in time, with queries for keys and output gradients for values, the
same two kernels compute the gradient of S. Denominators have states of value dimension 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import divide_steps, dot_precision, split_program_id, wait_for_mma
from sympow.kernels.launch import blocks_of, ceil_div, flat_grid, launch
from sympow.kernels.states.quartic_features import COLUMNS, PairFeatures, StateLayout, update_tiles

SCAN_BLOCK = 2048
OVERLAP_SPLITS = 16


@triton.jit
def quartic_update_kernel(
    inner_desc, outer_desc, y_desc, states_ptr, first_tile_ptr, column_ptr, block_ptr,
    wide_tiles, kv_heads, state_count, chunk, state_rows, inner_columns,
    GROUP: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ x_o y x_m over the tokens of a chunk, for a block of PAIRS outer pairs o and up to COLUMNS inner columns m."""
    wide_tile, rest = split_program_id(wide_tiles, tl.int32)
    state_index, kv_sequence = rest % state_count, rest // state_count
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    column = tl.load(column_ptr + wide_tile)
    pair = tl.load(block_ptr + wide_tile) * PAIRS
    tiles = chunk // TOKENS
    acc = tl.zeros((PAIRS * E, COLUMNS), tl.float32)
    for step in tl.range(0, GROUP * tiles, num_stages=STAGES):
        member, tile = divide_steps(step, tiles, GROUP)
        sequence = (batch * kv_heads + kv_head) * GROUP + member
        start = state_index * chunk + tile * TOKENS
        # Zeros past the last token.
        inner = inner_desc.load([sequence, start, column]).reshape(TOKENS, COLUMNS)
        outer = outer_desc.load([sequence, pair, start]).reshape(PAIRS, TOKENS)
        y = y_desc.load([sequence, 0, start]).reshape(E, TOKENS)
        left = tl.reshape(outer[:, None, :] * y[None, :, :], (PAIRS * E, TOKENS))
        acc = wait_for_mma(tl.dot(left, inner, acc, input_precision=PRECISION))
    rows = tl.load(first_tile_ptr + wide_tile) * TILE + tl.arange(0, COLUMNS)
    out = states_ptr + ((kv_sequence * state_count + state_index).to(tl.int64) * state_rows + rows)[None, :] * (
        PAIRS * E
    )
    # Columns past the last belong to no tile and are not stored.
    inside = (column + tl.arange(0, COLUMNS) < inner_columns)[None, :]
    tl.store(out + tl.arange(0, PAIRS * E)[:, None], acc.to(states_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quartic_scan_kernel(
    states_ptr, weights_ptr, gate_sums_ptr, time, state_count, chunk, size,
    E: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """state_s = c x_s + exp(G_{R_s} − G_{R_{s−1}}) state_{s−1} over the boundaries, in place; REVERSE: backwards."""
    block, kv_sequence = split_program_id(size // BLOCK)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    weights = tl.load(weights_ptr + offsets // E)
    base = states_ptr + kv_sequence * state_count * size + offsets
    state = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, state_count, num_stages=4):
        state_index = state_count - 1 - step if REVERSE else step
        if GATED:
            # Between this boundary and the previously visited one; at the first there is nothing to decay.
            earlier = state_index if REVERSE else state_index - 1
            known = (earlier >= 0) & (earlier + 1 < state_count)
            ends = gate_sums_ptr + kv_sequence * time + (earlier + 1) * chunk - 1
            log_decay = tl.load(ends + chunk, mask=known, other=0.0) - tl.load(ends, mask=known, other=0.0)
            state *= tl.exp(log_decay.to(tl.float32))
        state += tl.load(base + state_index.to(tl.int64) * size).to(tl.float32)
        tl.store(base + state_index.to(tl.int64) * size, (state * weights).to(states_ptr.dtype.element_ty))


@triton.jit
def overlap_kernel(
    earlier_ptr, future_ptr, weights_ptr, out_ptr, size, blocks, state_count, E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Σ earlier * future / c over every `splits`-th block of two states one chunk apart; both contain the coefficients
    c."""
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    state_index = pair // (state_count - 1) * state_count + pair % (state_count - 1)
    earlier_ptr += state_index.to(tl.int64) * size
    future_ptr += (state_index + 1).to(tl.int64) * size
    acc = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(split, blocks, splits, num_stages=3):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + offsets // E)
        earlier = tl.load(earlier_ptr + offsets).to(tl.float32)
        future = tl.load(future_ptr + offsets).to(tl.float32)
        acc += earlier * future / tl.where(weights == 0, 1.0, weights)
    tl.store(out_ptr + pair * splits + split, tl.sum(acc, axis=0))


def chunk_states(
    x: PairFeatures,
    y: Tensor,
    kv_heads: int,
    gate_sums: Tensor | None,
    chunk: int,
    layout: StateLayout,
    *,
    reverse: bool,
    tokens: int = 64,
    columns: int = 128,
    warps: int = 8,
    stages: int = 3,
) -> Tensor:
    """States at all n boundaries, (b · h_kv · n, layout.rows, pairs · e), in the dtype of y.

    Args:
        x: pair features of keys, or of queries with `reverse`.
        y: values (b, h_kv, e, t), or output gradients (b, h, e, t) with `reverse`; t as in x.
        gate_sums: G of the whole sequence, (b, h_kv, time) float64, or None without gates.
        reverse: sum over the tokens after each boundary instead of those before it.
    """
    batch, heads, length, inner_columns = x.inner.shape
    value_dim = y.shape[2]
    state_count = ceil_div(length, chunk)
    width = layout.pairs * value_dim
    states = y.new_empty(batch * kv_heads * state_count, layout.rows, width)
    first_tile, column, block = update_tiles(layout.dim, layout.pairs, columns, y.device)
    launch(
        quartic_update_kernel, flat_grid(column.shape[0], state_count, batch * kv_heads),
        blocks_of(x.inner.flatten(0, 1), [1, tokens, columns]),
        blocks_of(x.outer.flatten(0, 1), [1, layout.pairs, tokens]),
        blocks_of(y.flatten(0, 1), [1, value_dim, tokens]),
        states, first_tile, column, block, column.shape[0], kv_heads, state_count, chunk, layout.rows, inner_columns,
        GROUP=heads // kv_heads, E=value_dim, PAIRS=layout.pairs, COLUMNS=columns, TILE=COLUMNS, TOKENS=tokens,
        PRECISION=dot_precision(y.dtype), STAGES=stages, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    size = layout.rows * width
    launch(
        quartic_scan_kernel, flat_grid(size // SCAN_BLOCK, batch * kv_heads),
        states, layout.weights, gate_sums, 0 if gate_sums is None else gate_sums.shape[-1], state_count, chunk, size,
        E=value_dim, GATED=gate_sums is not None, REVERSE=reverse, BLOCK=SCAN_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return states


def overlap(earlier: Tensor, future: Tensor, state_count: int, layout: StateLayout) -> Tensor:
    """Σ B_ij g_i · y_j over the pairs with j before and i after a chunk, without the decay of that chunk.

    Args:
        earlier: states of (k, y), for each sequence at its `state_count` boundaries.
        future: reversed states of (q, g), likewise.

    Returns (sequences · (state_count − 1),) float64, for the chunks between two boundaries.
    """
    states, rows, width = earlier.shape
    blocks = rows * width // SCAN_BLOCK
    splits = min(OVERLAP_SPLITS, blocks)
    out = earlier.new_empty(states // state_count * (state_count - 1), splits, dtype=torch.float32)
    launch(
        overlap_kernel, (out.shape[0], splits),
        earlier, future, layout.weights, out, rows * width, blocks, state_count, E=width // layout.pairs,
        BLOCK=SCAN_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out.sum(-1, dtype=torch.float64)
