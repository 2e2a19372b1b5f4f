"""Forward pass of the attention form, and of the chunked form once the states are known.

y_i = Σ_{j≤i} B_ij v_j / Σ_{j≤i} B_ij,   B_ij = exp(G_i − G_j) (q_i · k_j)^p.

A program owns a tile of queries that starts at row r and visits, in this order,
1. the state that earlier chunks left (chunked form, p = 2): Σ_a Σ_i q_i q_a S_ia = Σ_i (q * q_i) S_i, the left operand
   made in registers, one product per entry i of the query;
2. the keys of its chunk before r: scores to the p-th power times exp(G_r − G_j), one factor per column;
3. the keys of its own tile, where exp(G_i − G_j) is formed for each element.
Between 2 and 3 the sums are multiplied by exp(G_i − G_r) per row. No exponent is ever positive.

How much a query sees of the state, φ(q) Z = Σ_ia q_i q_a Z_ia, is a sum of numbers of both signs. Where it is less than
the rounding of Z explains, nothing is known about it, and to divide by it could give outputs of any size: such a query
sees nothing, and neither φ(q) S nor its gradients count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sympow.kernels.common import (
    EPSILON,
    STATE_EPSILON,
    Documents,
    block_dim,
    dot_precision,
    empty_aligned,
    even_power,
    head_major,
    or_one,
    pairwise_decay,
    power_of_two_scale,
    round_to,
    settle,
    split_sum,
)
from sympow.kernels.gates import Gates
from sympow.kernels.states.quadratic import ChunkStates, sum_at


@triton.jit
def _row_parts(scores, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four partial sums of each row: those that a thread of a matrix product holds, so that none are exchanged."""
    return tl.sum(tl.sum(tl.reshape(scores, (ROWS, COLUMNS // 8, 4, 2)), axis=3), axis=1)


@triton.jit
def _query_state(
    acc, q, q_low, q_high, q_ptr, scale, rows, length, stride_t, low_desc, high_desc, normalizer_desc, slot,
    D: tl.constexpr, E: tl.constexpr, HIGH_COLUMN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """φ(q) S, on top of acc = 0, and φ(q) Z; q_low and q_high are the two halves of q, not yet scaled.

    S is symmetric in its two feature indices (i, a), so of the block with i in the upper and a in the lower half
    nothing is read; its mirror image counts twice.
    """
    HALF: tl.constexpr = D // 2
    normalizer = normalizer_desc.load([slot, 0, 0]).reshape(D, D)
    found = tl.sum(tl.dot(q, normalizer, input_precision=PRECISION) * q.to(tl.float32), axis=1)
    size = tl.abs(q)
    most = tl.sum(tl.dot(size, tl.abs(normalizer), input_precision=PRECISION) * size.to(tl.float32), axis=1)
    epsilon = STATE_EPSILON if q.dtype == tl.bfloat16 else EPSILON
    # NaN is not below anything, and stays visible.
    unseen = found < most * epsilon
    scale = scale.to(q_low.dtype)
    q_low, q_high = q_low * scale[:, None], q_high * scale[:, None]
    # Two sums, so that one product can run while the operand of the other is made; to wait for the second is to wait
    # for both. Entries of q are read one step ahead, from rows clamped to the sequence: what they add is never stored.
    other = tl.zeros_like(acc)
    pointers = q_ptr + tl.minimum(rows, length - 1).to(tl.int64) * stride_t
    ahead = tl.load(pointers)
    for i in tl.range(0, HALF):
        entry = ahead * scale
        ahead = tl.load(pointers + i + 1)
        kv_low = low_desc.load([slot, i, 0, 0]).reshape(E, HALF)
        kv_high = low_desc.load([slot, i, 0, HALF]).reshape(E, HALF)
        acc = tl.dot(q_low * entry[:, None], kv_low.T, acc, input_precision=PRECISION)
        other = settle(tl.dot(q_high * (entry * 2)[:, None], kv_high.T, other, input_precision=PRECISION))
    even, odd = ahead, tl.load(pointers + HALF + 1)
    for i in tl.range(0, HALF, 2):
        even_scaled, odd_scaled = even * scale, odd * scale
        next_pair = pointers + tl.minimum(HALF + i + 2, D - 2)
        even, odd = tl.load(next_pair), tl.load(next_pair + 1)
        kv_even = high_desc.load([slot, i, 0, HIGH_COLUMN]).reshape(E, HALF)
        kv_odd = high_desc.load([slot, i + 1, 0, HIGH_COLUMN]).reshape(E, HALF)
        acc = tl.dot(q_high * even_scaled[:, None], kv_even.T, acc, input_precision=PRECISION)
        other = settle(tl.dot(q_high * odd_scaled[:, None], kv_odd.T, other, input_precision=PRECISION))
    acc += other
    return tl.where(unseen[:, None], 0.0, acc), tl.where(unseen, 0.0, found)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, y_desc, weight_ptr, sums_ptr, to_end_ptr,
    q_ptr, q_stride_b, q_stride_t, q_stride_h, q_half_desc, low_desc, high_desc, normalizer_desc, past_ptr,
    document_start_ptr, length, padded_length, heads, chunk, slots, first_boundary,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr,
    WITH_STATE: tl.constexpr, DOCUMENTS: tl.constexpr, HIGH_COLUMN: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y_i for a tile of queries, Σ_j B_ij, and what of that a state gave, decayed no further than that state."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the most keys first: they would end last
    sequence = tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    if GATED:
        sums_ptr += kv_sequence.to(tl.int64) * length
        to_end_ptr += kv_sequence.to(tl.int64) * padded_length

    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    scale = power_of_two_scale(q)
    q = (q * scale[:, None]).to(q_desc.dtype)
    acc = tl.zeros((ROWS, E), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)

    boundary = first // chunk
    chunk_start = boundary * chunk
    document_start = tl.load(document_start_ptr + first) if DOCUMENTS else 0
    if GATED:
        reference = tl.load(sums_ptr + first)

    if WITH_STATE:
        past_ptr += sequence.to(tl.int64) * length
        # A document that began in this chunk has nothing in the state.
        if (boundary >= first_boundary) & (document_start <= chunk_start):
            # Read again, since here they are wanted in another register layout than q.
            q_low = q_half_desc.load([batch, head, first, 0]).reshape(ROWS, D // 2)
            q_high = q_half_desc.load([batch, head, first, D // 2]).reshape(ROWS, D // 2)
            entries = q_ptr + batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
            acc, weight = _query_state(
                acc, q, q_low, q_high, entries, scale, rows, length, q_stride_t, low_desc, high_desc,
                normalizer_desc, kv_sequence * slots + boundary - first_boundary, D, E, HIGH_COLUMN, PRECISION,
            )  # fmt: skip
            tl.store(past_ptr + rows, weight, mask=rows < length)
            if GATED:
                since_state = tl.exp((reference - sum_at(sums_ptr, boundary, chunk, length)).to(tl.float32))
                acc *= since_state
                weight *= since_state

    if DOCUMENTS:
        # Gates closed between documents would make these tiles zero; it is faster not to visit them.
        chunk_start = tl.maximum(chunk_start, document_start // COLUMNS * COLUMNS)
    if GATED:
        # One tile ahead in registers: through shared memory they would cost a barrier per tile.
        to_tile_end = tl.load(to_end_ptr + chunk_start + tl.arange(0, COLUMNS))
        tile_end = tl.load(sums_ptr + tl.minimum(chunk_start + COLUMNS, length) - 1)
    parts = tl.zeros((ROWS, 4), tl.float32)
    for start in tl.range(chunk_start, first, COLUMNS, num_stages=STAGES):
        k = k_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        scores = even_power(tl.dot(q, k.T, input_precision=PRECISION), POWER)
        if GATED:
            column_decay = to_tile_end * tl.exp((reference - tile_end).to(tl.float32))
            scores *= column_decay[None, :]
            to_tile_end = tl.load(to_end_ptr + start + COLUMNS + tl.arange(0, COLUMNS))
            tile_end = tl.load(sums_ptr + tl.minimum(start + 2 * COLUMNS, length) - 1)
        parts += _row_parts(scores, ROWS, COLUMNS)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        acc = tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION)
    weight += tl.sum(parts, axis=1)

    if GATED:
        row_whole, row_rest = split_sum(tl.load(sums_ptr + tl.minimum(rows, length - 1)), reference)
        row_decay = tl.exp2(row_whole + row_rest)
        acc *= row_decay[:, None]
        weight *= row_decay

    # Not pipelined: the registers for it would come out of the loop above.
    for start in tl.range(first, first + ROWS, COLUMNS, num_stages=1):
        columns = start + tl.arange(0, COLUMNS)
        k = k_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, D)
        scores = even_power(tl.dot(q, k.T, input_precision=PRECISION), POWER)
        causal = rows[:, None] >= columns[None, :]
        if GATED:
            column_sums = tl.load(sums_ptr + tl.minimum(columns, length - 1))
            column_whole, column_rest = split_sum(column_sums, reference)
            scores *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
        else:
            scores = tl.where(causal, scores, 0.0)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(COLUMNS, E)
        # Weights as they enter the product: then a row that sees one key returns its value exactly, and the gradient of
        # its score is zero, as it should be, however small the score.
        scores = round_to(scores, v.dtype)
        weight += tl.sum(scores, axis=1)
        acc = tl.dot(scores.to(v.dtype), v, acc, input_precision=PRECISION)

    y = acc / or_one(weight)[:, None]
    y_desc.store([batch, head, first, 0], y.to(y_desc.dtype).reshape(1, 1, ROWS, E))
    tl.store(weight_ptr + sequence.to(tl.int64) * length + rows, weight, mask=rows < length)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    gates: Gates | None,
    states: ChunkStates | None = None,
    *,
    chunk: int = 0,
    documents: Documents | None = None,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
    rows: int = 128,
    columns: int = 64,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (b, t, h, e), the rows' weights Σ_j B_ij (b, h, t) float32, and what of them states gave (b, h, t) float32.

    Args:
        gates: from `running_sums` with tiles of `columns` tokens, or None.
        states: what earlier chunks left, each chunk a multiple of `rows` tokens.
        chunk: without states, how many tokens share a chunk, attending to none before it; 0: all.
        documents: where documents begin and end, between which `gates` must be closed; None: one document.
        out: what to write the results to: y with aligned rows (`common.aligned`), and the others contiguous, the last
            of them zeros as far as there are no states; None: new tensors.
    """
    assert rows % columns == 0 and (gates is None or gates.tile == columns)
    batch, length, heads, dim = q.shape
    value_dim = v.shape[-1]
    d, e = block_dim(dim), block_dim(value_dim)
    past: Tensor | None = None
    if out is None:
        y = empty_aligned(v, batch, length, heads, value_dim)
        weight = q.new_empty(batch, heads, length, dtype=torch.float32)
    else:
        y, weight, past = out
    q_desc = head_major(q, (rows, d))
    q = q_desc.base.transpose(1, 2)
    if states is None:
        chunk, slots, high_column, first_boundary = chunk or length + rows, 0, 0, 0
        q_half_desc = low_desc = high_desc = normalizer_desc = None
    else:
        assert dim == d and value_dim == e and power == 2 and states.chunk % rows == 0
        chunk, slots, high_column = states.chunk, states.low.shape[2], states.high.shape[-1] - d // 2
        first_boundary = states.first
        q_half_desc = head_major(q, (rows, d // 2))
        low_desc = TensorDescriptor.from_tensor(states.low.flatten(0, 2), [1, 1, e, d // 2])
        high_desc = TensorDescriptor.from_tensor(states.high.flatten(0, 2), [1, 1, e, d // 2])
        normalizer_desc = TensorDescriptor.from_tensor(states.normalizer.flatten(0, 2), [1, d, d])
        past = torch.zeros_like(weight) if past is None else past
    forward_kernel[(triton.cdiv(length, rows), batch * heads)](
        q_desc, head_major(k, (columns, d)), head_major(v, (columns, e)), head_major(y, (rows, e)), weight,
        gates and gates.sums, gates and gates.to_end, q, q.stride(0), q.stride(1), q.stride(2),
        q_half_desc, low_desc, high_desc, normalizer_desc, past, documents and documents.start,
        length, gates.to_end.shape[-1] if gates else 0, heads, chunk, slots, first_boundary,
        GROUP=heads // k.shape[2], D=d, E=e, POWER=power, GATED=gates is not None, WITH_STATE=states is not None,
        DOCUMENTS=documents is not None, HIGH_COLUMN=high_column, PRECISION=dot_precision(q.dtype), ROWS=rows,
        COLUMNS=columns, STAGES=stages, num_warps=warps, num_stages=stages, maxnreg=registers, enable_fp_fusion=True,
    )  # fmt: skip
    return y, weight, past
