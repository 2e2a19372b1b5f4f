"""Forward pass of the attention form of p = 2 with a gate per rotated pair.

y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij,   B_ij = (Σ_m exp((G_im − G_jm)/p) q_im k_jm)^p.

A CTA owns a tile of queries and visits keys from its own backwards:
1. the blocks of its own tile: queries, decayed from the starts of their blocks, are multiplied by the decays across all
   blocks between them and the keys, and the keys have decayed to the ends of their blocks. Scores within one block are
   given (`neighbours`);
2. the earlier tiles, whose keys have decayed to their ends, likewise, with one factor per entry for all queries.
These factors are running products, so no exponential is computed here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import (
    INTERPRETED,
    Documents,
    dot_precision,
    empty_aligned,
    head_major,
    or_one,
    partial_row_sums,
    round_to,
    split_program_id,
    wait_for_mma,
)
from sympow.kernels.pair_gates.decays import BLOCK, TILE, DecayTables


@triton.jit
def decay_columns(x, decay):
    """x (rows, d) times one factor per column, in the dtype of x: a left operand of a product."""
    return x * decay.to(x.dtype)[None, :]


@triton.jit
def in_product_layout(x, D: tl.constexpr, PRECISION: tl.constexpr):
    """x (rows, d) itself, in the register layout of a product's result.

    A left operand computed from it then needs no exchange through shared memory before each product. Multiplied by the
    unit matrix, which is exact.
    """
    if INTERPRETED:
        return x
    else:
        places = tl.arange(0, D)
        unit = (places[:, None] == places[None, :]).to(x.dtype)
        return tl.dot(x, unit, input_precision=PRECISION).to(x.dtype)


@triton.jit
def forward_kernel(
    q_desc, near_desc, far_desc, v_desc, v_block_desc, y_desc, weight_ptr, neighbours_ptr, across_blocks_ptr,
    across_tiles_ptr, document_start_ptr, length, padded, heads, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y_i for a tile of queries, and their weights Σ_j B_ij."""
    tiles = tl.cdiv(length, ROWS)
    tile, sequence = split_program_id(tiles)
    tile = tiles - 1 - tile  # tiles with the most keys start first
    batch, head = (sequence // heads).to(tl.int32), (sequence % heads).to(tl.int32)
    kv_head = head // GROUP
    kv_sequence = (batch * (heads // GROUP) + kv_head).to(tl.int64)
    first = tile * ROWS
    places = tl.arange(0, ROWS)
    rows = first + places
    row_block = (places // BLOCK)[:, None]
    entries = tl.arange(0, D)
    across_blocks_ptr += (kv_sequence * (padded // BLOCK) + first // BLOCK) * D
    across_tiles_ptr += kv_sequence * (padded // COLUMNS) * D

    q = in_product_layout(q_desc.load([batch, head, first, 0]).reshape(ROWS, D), D, PRECISION)
    places_in_block = tl.arange(0, BLOCK)
    neighbours_ptr += sequence * BLOCK * padded
    neighbours = tl.load(neighbours_ptr + places_in_block[None, :] * padded + rows[:, None])
    acc = tl.zeros((ROWS, E), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)

    since = tl.full((ROWS, D), 1.0, tl.float32)
    for step in tl.range(0, ROWS // BLOCK, num_stages=1):
        block = ROWS // BLOCK - 1 - step
        start = first + block * BLOCK
        k = near_desc.load([batch, kv_head, start, 0]).reshape(BLOCK, D)
        scores = tl.dot((q * since).to(q.dtype), k.T, input_precision=PRECISION)
        scores = tl.where(row_block > block, scores, tl.where(row_block == block, neighbours, 0.0))
        v = v_block_desc.load([batch, kv_head, start, 0]).reshape(BLOCK, E)
        # Weights are summed as rounded for the product, as in `attention.forward`.
        scores = round_to(scores * scores, v.dtype)
        weight += tl.sum(scores, axis=1)
        acc = wait_for_mma(tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION))
        across = tl.load(across_blocks_ptr + block * D + entries)
        since = tl.where(row_block > block, since * across[None, :], since)

    q = (q * since).to(q.dtype)
    between = tl.full((D,), 1.0, tl.float32)
    begin = first // chunk * chunk
    if DOCUMENTS:
        # Closed gates between documents make earlier tiles zero, so they are skipped.
        begin = tl.maximum(begin, tl.load(document_start_ptr + first) // COLUMNS * COLUMNS)
    partial_sums = tl.zeros((ROWS, 4), tl.float32)
    for step in tl.range(0, (first - begin) // COLUMNS, num_stages=STAGES):
        start = first - (step + 1) * COLUMNS
        k = far_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        scores = tl.dot(decay_columns(q, between), k.T, input_precision=PRECISION)
        between *= tl.load(across_tiles_ptr + start // COLUMNS * D + entries)
        scores *= scores
        partial_sums += partial_row_sums(scores, ROWS, COLUMNS)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        # The wait keeps the next left operand from overwriting registers that this product still reads.
        acc = wait_for_mma(tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION))
    weight += tl.sum(partial_sums, axis=1)

    y = acc / or_one(weight)[:, None]
    y_desc.store([batch, head, first, 0], y.to(y_desc.dtype).reshape(1, 1, ROWS, E))
    tl.store(weight_ptr + sequence * length + rows, weight, mask=rows < length)


def attend(
    q: Tensor,
    near: Tensor,
    far: Tensor,
    v: Tensor,
    neighbours: Tensor,
    tables: DecayTables,
    *,
    chunk: int = 0,
    documents: Documents | None = None,
    rows: int = 128,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """y (b, t, h, e) and the rows' weights Σ_j B_ij (b, h, t) float32.

    Args:
        q: queries, scaled and decayed from the start of their block (`decays.decay_queries`).
        near, far: keys, decayed to the end of their block and of their tile (`decays.decay_keys`).
        neighbours: scores within blocks (`neighbours.neighbour_scores`).
        chunk: tokens per chunk, which sees no earlier one, a multiple of `rows`; 0: all in one.
        documents: where documents begin and end, between which gates must be closed; None: one document.
    """
    batch, length, heads, dim = q.shape
    value_dim = v.shape[-1]
    assert chunk % rows == 0
    y = empty_aligned(v, batch, length, heads, value_dim)
    weight = q.new_empty(batch, heads, length, dtype=torch.float32)
    forward_kernel[(triton.cdiv(length, rows) * batch * heads,)](
        head_major(q, (rows, dim)), head_major(near, (BLOCK, dim)), head_major(far, (TILE, dim)),
        head_major(v, (TILE, value_dim)), head_major(v, (BLOCK, value_dim)), head_major(y, (rows, value_dim)), weight,
        neighbours, tables.across_blocks, tables.across_tiles, documents and documents.start, length,
        neighbours.shape[-1], heads, chunk or length + rows,
        GROUP=heads // near.shape[2], D=dim, E=value_dim, DOCUMENTS=documents is not None,
        PRECISION=dot_precision(q.dtype), ROWS=rows, COLUMNS=TILE, BLOCK=BLOCK, STAGES=stages, num_warps=warps,
        num_stages=stages, maxnreg=registers, enable_fp_fusion=True,
    )  # fmt: skip
    return y, weight
