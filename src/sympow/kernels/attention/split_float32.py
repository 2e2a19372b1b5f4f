"""The attention form for float32 inputs, by products of float16 pieces on the tensor cores.

A float32 number x in range is the sum of two float16 numbers, x = h + l with h = x rounded and l = x − h rounded: 22
bits, and the sign of l. A product of two such matrices takes three products of pieces, l h' + h l' + h h'; l l' is
below the rounding of float32. Tensor cores multiply float16 twice as fast as tf32 and read it in either order, so this
takes about half the time of three products in tf32 (`dot_precision`), and the pieces of inputs are computed once, not
in every tile.

Ranges are those of float16 (`float16_range`). Keys are scaled per head to lengths up to 2^SPLIT_EXPONENT, and values to
entries up to that; all else is scaled as in float16. Sums over tiles are added up outside the tensor cores, which
truncate. So the weights of each tile can have scales of their own: a row's largest weight in the tile is scaled to the
limit of the range (`_split_rows`). A row keeps its precision even if its query is nearly orthogonal to the few keys it
sees, and its weights are far below their bound. In the gradient of keys a row is a key, and its weights are far below
their bound where queries see many keys, or where another query has a far larger output gradient.

One document, one chunk, without states, heads of up to 64; the portable kernels compute the rest. Their plain PyTorch
reference is that of these kernels, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import (
    LOG2_E,
    divide_steps,
    even_power,
    odd_power,
    or_one,
    pairwise_decay,
    power_of_two_scale,
    split_program_id,
    split_sum,
)
from sympow.kernels.float16_range import (
    GRADIENT_FACTOR,
    GRADIENT_SCALES,
    KEY_EXPONENT,
    KEY_LENGTH,
    SCALES,
    SPLIT_EXPONENT,
    VALUE_EXPONENT,
    VALUE_FACTOR,
    WEIGHT_LIMIT,
    KeyRange,
    RowGradients,
    _power,
    exponent_to_limit,
    exponents,
    log_length,
    power_of_two,
    query_exponents,
    store_pieces,
)
from sympow.kernels.launch import block_dim, ceil_div, empty_aligned, flat_grid, head_major, launch
from sympow.kernels.running_sums import Gates

LARGEST_DIM = 64
# Whether they also run in Triton's interpreter, where the portable kernels are tested in float32.
ON_CPU = False
# log2 of the factor of queries in the forward pass: with largest entries from 8 to 16, lower pieces are normal numbers.
QUERY_EXPONENT = tl.constexpr(3.0)


@triton.jit
def _load(desc, batch, batches, head, start, ROWS: tl.constexpr, D: tl.constexpr):
    """The two pieces of a tile."""
    coarse = desc.load([batch, head, start, 0]).reshape(ROWS, D)
    fine = desc.load([batch + batches, head, start, 0]).reshape(ROWS, D)
    return coarse, fine


@triton.jit
def _product(coarse, fine, other_coarse, other_fine):
    """The product of two matrices in pieces."""
    product = tl.dot(fine, other_coarse)
    product = tl.dot(coarse, other_fine, product)
    return tl.dot(coarse, other_coarse, product)


@triton.jit
def _split(x):
    coarse = x.to(tl.float16)
    return coarse, (x - coarse.to(tl.float32)).to(tl.float16)


@triton.jit
def _split_rows(x):
    """The two pieces of x, each row scaled so that its largest entry is close to the limit of the range; and the powers
    of two that undo these scales."""
    lift = exponent_to_limit(tl.max(tl.abs(x), axis=1), WEIGHT_LIMIT)
    coarse, fine = _split(x * power_of_two(lift)[:, None])
    return coarse, fine, power_of_two(-lift)


@triton.jit
def split_keys_kernel(
    k_desc, v_desc, k_pieces, v_pieces, scales_ptr, length, batches, heads,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile, scaled, in pieces."""
    tile, sequence = split_program_id(tl.cdiv(length, ROWS), tl.int32)
    first = tile * ROWS
    batch, head = sequence // heads, sequence % heads
    scales_ptr += sequence * SCALES
    k = k_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    k *= power_of_two(-tl.load(scales_ptr + KEY_EXPONENT) + SPLIT_EXPONENT)
    store_pieces(k_pieces, k, batch, batches, head, first, ROWS, D)
    v = v_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    v *= power_of_two(-tl.load(scales_ptr + VALUE_EXPONENT) + SPLIT_EXPONENT)
    store_pieces(v_pieces, v, batch, batches, head, first, ROWS, E)


@triton.jit
def split_queries_kernel(
    q_desc, q_pieces, length_ptr, length, padded, batches, heads, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Queries of a tile with largest entries from 8 to 16, in pieces; and log2 |q| where those are from 1 to 2."""
    tile, sequence = split_program_id(tl.cdiv(length, ROWS), tl.int32)
    first = tile * ROWS
    batch, head = sequence // heads, sequence % heads
    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    q *= power_of_two_scale(q)[:, None]
    q_length = log_length(q)
    tl.store(length_ptr + sequence.to(tl.int64) * padded + first + tl.arange(0, ROWS), q_length)
    q *= 2.0**QUERY_EXPONENT
    store_pieces(q_pieces, q, batch, batches, head, first, ROWS, D)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, y_desc, denominator_ptr, gate_sums_ptr, to_end_ptr, q_length_ptr, bound_ptr, scales_ptr,
    length, padded, gates_padded, batches, heads,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y_i for a tile of queries, and their denominators Σ_j B_ij."""
    tiles = tl.cdiv(length, ROWS)
    order, sequence = split_program_id(tiles, tl.int32)
    tile = tiles - 1 - order  # tiles with the most keys start first
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    scales_ptr += kv_sequence * SCALES
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        to_end_ptr += kv_sequence.to(tl.int64) * gates_padded
        reference = tl.load(gate_sums_ptr + first)
        to_tile_end = tl.load(to_end_ptr + tl.arange(0, COLUMNS))
        tile_end = tl.load(gate_sums_ptr + tl.minimum(COLUMNS, length) - 1)

    bound_ptr += kv_sequence.to(tl.int64) * length
    key_exponent = -tl.load(scales_ptr + KEY_EXPONENT) + SPLIT_EXPONENT
    own_bound = tl.load(bound_ptr + tl.minimum(rows, length - 1)) + key_exponent
    q_length = tl.load(q_length_ptr + sequence.to(tl.int64) * padded + rows)
    exponent, change = exponents(q_length, tl.load(bound_ptr + first) + key_exponent, own_bound, WEIGHT_LIMIT, POWER)
    change *= POWER
    # What weights are made of must not leave the range of float16. Queries themselves keep their precision.
    score_scale = power_of_two(exponent - QUERY_EXPONENT)

    q, q_fine = _load(q_desc, batch, batches, head, first, ROWS, D)
    acc = tl.zeros((ROWS, E), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, first, COLUMNS, num_stages=STAGES):
        k, k_fine = _load(k_desc, batch, batches, kv_head, start, COLUMNS, D)
        scores = even_power(_product(q, q_fine, k.T, k_fine.T) * score_scale[:, None], POWER)
        if GATED:
            scores *= (to_tile_end * tl.exp((reference - tile_end).to(tl.float32)))[None, :]
            to_tile_end = tl.load(to_end_ptr + start + COLUMNS + tl.arange(0, COLUMNS))
            tile_end = tl.load(gate_sums_ptr + tl.minimum(start + 2 * COLUMNS, length) - 1)
        denominator += tl.sum(scores, axis=1)
        v, v_fine = _load(v_desc, batch, batches, kv_head, start, COLUMNS, E)
        coarse, fine, unit = _split_rows(scores)
        acc += _product(coarse, fine, v, v_fine) * unit[:, None]

    row_scale = power_of_two(change)
    if GATED:
        row_whole, row_rest = split_sum(tl.load(gate_sums_ptr + tl.minimum(rows, length - 1)), reference)
        row_whole += change
        row_scale = tl.exp2(row_whole + row_rest)
    acc *= row_scale[:, None]
    denominator *= row_scale
    rounding = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(first, first + ROWS, COLUMNS, num_stages=1):
        columns = start + tl.arange(0, COLUMNS)
        k, k_fine = _load(k_desc, batch, batches, kv_head, start, COLUMNS, D)
        scores = even_power(_product(q, q_fine, k.T, k_fine.T) * score_scale[:, None], POWER)
        causal = rows[:, None] >= columns[None, :]
        if GATED:
            column_sums = tl.load(gate_sums_ptr + tl.minimum(columns, length - 1))
            column_whole, column_rest = split_sum(column_sums, reference)
            scores *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
        else:
            scores = tl.where(causal, scores * row_scale[:, None], 0.0)
        v, v_fine = _load(v_desc, batch, batches, kv_head, start, COLUMNS, E)
        coarse, fine, unit = _split_rows(scores)
        denominator += tl.sum(scores, axis=1)
        # As rounded for the product, so that a row that sees one key returns its value.
        rounding += tl.sum(scores - (coarse.to(tl.float32) + fine.to(tl.float32)) * unit[:, None], axis=1)
        acc += _product(coarse, fine, v, v_fine) * unit[:, None]

    y = (
        acc
        / or_one(denominator - rounding)[:, None]
        * power_of_two(tl.load(scales_ptr + VALUE_EXPONENT) - SPLIT_EXPONENT)
    )
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, ROWS, E))
    denominator *= power_of_two(-exponent * POWER) * power_of_two(-change) * _power(power_of_two(-key_exponent), POWER)
    tl.store(denominator_ptr + sequence.to(tl.int64) * length + rows, denominator, mask=rows < length)


@triton.jit
def query_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dq_desc, row_term_ptr, scale_ptr, gate_sums_ptr, to_end_ptr,
    q_length_ptr, factor_ptr, bound_ptr, key_scales_ptr, scales_ptr, length, padded, gates_padded, batches, heads,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq_i for a tile of queries, and q_i · dq_i."""
    tiles = tl.cdiv(length, ROWS)
    order, sequence = split_program_id(tiles, tl.int32)
    tile = tiles - 1 - order
    batch, head = sequence // heads, sequence % heads
    kv_head = head // GROUP
    kv_sequence = batch * (heads // GROUP) + kv_head
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    out = sequence.to(tl.int64) * padded + rows
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        to_end_ptr += kv_sequence.to(tl.int64) * gates_padded
        reference = tl.load(gate_sums_ptr + first)
        to_tile_end = tl.load(to_end_ptr + tl.arange(0, COLUMNS))
        tile_end = tl.load(gate_sums_ptr + tl.minimum(COLUMNS, length) - 1)
    bound_ptr += kv_sequence.to(tl.int64) * length
    key_exponent = -tl.load(key_scales_ptr + kv_sequence * SCALES + KEY_EXPONENT) + SPLIT_EXPONENT
    own_bound = tl.load(bound_ptr + tl.minimum(rows, length - 1)) + key_exponent
    log_decay = tl.zeros((ROWS,), tl.float32)
    if GATED:
        log_decay = ((reference - tl.load(gate_sums_ptr + tl.minimum(rows, length - 1))) * LOG2_E).to(tl.float32)
    key_length = tl.load(scales_ptr + kv_sequence * GRADIENT_SCALES + KEY_LENGTH)
    exponent, change = query_exponents(
        tl.load(q_length_ptr + out), tl.load(bound_ptr + first) + key_exponent, own_bound, key_length, log_decay, POWER
    )
    change *= POWER - 1
    row_factor = power_of_two(exponent * (POWER - 1)) / key_length
    minus_delta = tl.load(minus_delta_ptr + out) * row_factor
    row_factor *= tl.load(scales_ptr + kv_sequence * GRADIENT_SCALES + VALUE_FACTOR)

    q, q_fine = _load(q_desc, batch, batches, head, first, ROWS, D)
    dy, dy_fine = _load(dy_desc, batch, batches, head, first, ROWS, E)
    dq = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, first, COLUMNS, num_stages=STAGES):
        k, k_fine = _load(k_desc, batch, batches, kv_head, start, COLUMNS, D)
        v, v_fine = _load(v_desc, batch, batches, kv_head, start, COLUMNS, E)
        score = _product(q, q_fine, k.T, k_fine.T)
        dp = _product(dy, dy_fine, v.T, v_fine.T) * row_factor[:, None] + minus_delta[:, None]
        factor = odd_power(score, POWER - 1)
        if GATED:
            factor *= (to_tile_end * tl.exp((reference - tile_end).to(tl.float32)))[None, :]
            to_tile_end = tl.load(to_end_ptr + start + COLUMNS + tl.arange(0, COLUMNS))
            tile_end = tl.load(gate_sums_ptr + tl.minimum(start + 2 * COLUMNS, length) - 1)
        coarse, fine, unit = _split_rows(factor * dp)
        dq += _product(coarse, fine, k, k_fine) * unit[:, None]

    row_scale = power_of_two(change)
    if GATED:
        row_whole, row_rest = split_sum(tl.load(gate_sums_ptr + tl.minimum(rows, length - 1)), reference)
        row_whole += change
        row_scale = tl.exp2(row_whole + row_rest)
    dq *= row_scale[:, None]
    for start in tl.range(first, first + ROWS, COLUMNS, num_stages=1):
        columns = start + tl.arange(0, COLUMNS)
        k, k_fine = _load(k_desc, batch, batches, kv_head, start, COLUMNS, D)
        v, v_fine = _load(v_desc, batch, batches, kv_head, start, COLUMNS, E)
        score = _product(q, q_fine, k.T, k_fine.T)
        dp = _product(dy, dy_fine, v.T, v_fine.T) * row_factor[:, None] + minus_delta[:, None]
        factor = odd_power(score, POWER - 1)
        causal = rows[:, None] >= columns[None, :]
        if GATED:
            column_sums = tl.load(gate_sums_ptr + tl.minimum(columns, length - 1))
            column_whole, column_rest = split_sum(column_sums, reference)
            factor *= pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal)
        else:
            factor = tl.where(causal, factor * row_scale[:, None], 0.0)
        coarse, fine, unit = _split_rows(factor * dp)
        dq += _product(coarse, fine, k, k_fine) * unit[:, None]

    # Keys are scaled, and so is what their sum has to be divided by.
    dq *= (tl.load(factor_ptr + out) * power_of_two(-change) / row_factor * POWER)[:, None]
    own = q.to(tl.float32) + q_fine.to(tl.float32)
    tl.store(row_term_ptr + sequence.to(tl.int64) * length + rows, tl.sum(dq * own, axis=1), mask=rows < length)
    dq *= tl.load(scale_ptr + sequence.to(tl.int64) * length + rows, mask=rows < length, other=0.0)[:, None]
    dq_desc.store([batch, head, first, 0], dq.reshape(1, 1, ROWS, D))


@triton.jit
def key_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, minus_delta_ptr, dk_desc, dv_desc, column_term_ptr, gate_sums_ptr, from_start_ptr,
    factor_ptr, key_scales_ptr, scales_ptr, block_terms_ptr, length, padded, gates_padded, batches, kv_heads,
    query_block,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POWER: tl.constexpr, GATED: tl.constexpr,
    BLOCK_TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv_j and dk_j for a tile of keys (rows here; queries are columns), summed over the query heads that read them,
    and k_j · dk_j. BLOCK_TERMS: also what each block of `query_block` queries adds to k_j · dk_j."""
    key_tile, kv_sequence = split_program_id(tl.cdiv(length, ROWS), tl.int32)
    first = key_tile * ROWS
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    rows = first + tl.arange(0, ROWS)
    last = tl.minimum(first + ROWS, length) - 1
    row_decay = tl.full((ROWS,), 1.0, tl.float32)
    if GATED:
        gate_sums_ptr += kv_sequence.to(tl.int64) * length
        from_start_ptr += kv_sequence.to(tl.int64) * gates_padded
        reference = tl.load(gate_sums_ptr + last)
        row_whole, row_rest = split_sum(tl.load(gate_sums_ptr + tl.minimum(rows, length - 1)), reference)
        row_decay = tl.exp2(-(row_whole + row_rest))
    scales_ptr += kv_sequence * GRADIENT_SCALES
    value_factor = tl.load(scales_ptr + VALUE_FACTOR)
    gradient_factor = tl.load(scales_ptr + GRADIENT_FACTOR)
    sequence = kv_sequence.to(tl.int64) * GROUP

    k, k_fine = _load(k_desc, batch, batches, kv_head, first, ROWS, D)
    v, v_fine = _load(v_desc, batch, batches, kv_head, first, ROWS, E)
    dk = tl.zeros((ROWS, D), tl.float32)
    dv = tl.zeros((ROWS, E), tl.float32)
    known = tl.zeros((ROWS,), tl.float32)
    offsets = tl.arange(0, COLUMNS)
    after = first + ROWS
    block = query_block if BLOCK_TERMS else length
    blocks = tl.cdiv(length, block)
    for index in tl.range(tl.where(after < length, after // block, blocks), blocks):
        begin = tl.maximum(after, index * block)
        tiles = tl.cdiv(tl.minimum(length, (index + 1) * block) - begin, COLUMNS)
        for step in tl.range(0, GROUP * tiles, num_stages=STAGES):
            member, tile = divide_steps(step, tiles, GROUP)
            start = begin + tile * COLUMNS
            q, q_fine = _load(q_desc, batch, batches, kv_head * GROUP + member, start, COLUMNS, D)
            dy, dy_fine = _load(dy_desc, batch, batches, kv_head * GROUP + member, start, COLUMNS, E)
            columns = (sequence + member) * padded + start + offsets
            column_factor = tl.load(factor_ptr + columns)
            minus_delta = tl.load(minus_delta_ptr + columns)
            score = _product(k, k_fine, q.T, q_fine.T)
            dp = _product(v, v_fine, dy.T, dy_fine.T) * value_factor + minus_delta[None, :]
            factor = odd_power(score, POWER - 1)
            tile_factor = gradient_factor
            if GATED:
                tile_factor *= tl.exp((tl.load(gate_sums_ptr + start) - reference).to(tl.float32))
                column_factor *= tl.load(from_start_ptr + start + offsets)
                factor *= row_decay[:, None]
            factor *= (column_factor * tile_factor)[None, :]
            coarse, fine, unit = _split_rows(factor * score)
            dv += _product(coarse, fine, dy, dy_fine) * unit[:, None]
            coarse, fine, unit = _split_rows(factor * dp)
            dk += _product(coarse, fine, q, q_fine) * unit[:, None]
        if BLOCK_TERMS:
            total = tl.sum(dk * (k.to(tl.float32) + k_fine.to(tl.float32)), axis=1) / (gradient_factor * value_factor)
            target = block_terms_ptr + (kv_sequence.to(tl.int64) * blocks + index) * length + rows
            tl.store(target, total - known, mask=rows < length)
            known = total

    for step in tl.range(0, GROUP * (ROWS // COLUMNS), num_stages=1):
        member, tile = divide_steps(step, ROWS // COLUMNS, GROUP)
        start = first + tile * COLUMNS
        positions = start + offsets
        q, q_fine = _load(q_desc, batch, batches, kv_head * GROUP + member, start, COLUMNS, D)
        dy, dy_fine = _load(dy_desc, batch, batches, kv_head * GROUP + member, start, COLUMNS, E)
        columns = (sequence + member) * padded + positions
        column_factor = tl.load(factor_ptr + columns) * gradient_factor
        minus_delta = tl.load(minus_delta_ptr + columns)
        score = _product(k, k_fine, q.T, q_fine.T)
        dp = _product(v, v_fine, dy.T, dy_fine.T) * value_factor + minus_delta[None, :]
        factor = odd_power(score, POWER - 1) * column_factor[None, :]
        causal = positions[None, :] >= rows[:, None]
        if GATED:
            column_whole, column_rest = split_sum(tl.load(gate_sums_ptr + tl.minimum(positions, length - 1)), reference)
            factor *= pairwise_decay(-row_whole, -row_rest, -column_whole, -column_rest, causal)
        else:
            factor = tl.where(causal, factor, 0.0)
        coarse, fine, unit = _split_rows(factor * score)
        dv += _product(coarse, fine, dy, dy_fine) * unit[:, None]
        coarse, fine, unit = _split_rows(factor * dp)
        dk += _product(coarse, fine, q, q_fine) * unit[:, None]

    dk *= POWER / (gradient_factor * value_factor)
    dv /= gradient_factor
    column_term = tl.sum(dk * (k.to(tl.float32) + k_fine.to(tl.float32)), axis=1)
    tl.store(column_term_ptr + kv_sequence.to(tl.int64) * length + rows, column_term, mask=rows < length)
    key_scales_ptr += kv_sequence * SCALES
    dk *= power_of_two(-tl.load(key_scales_ptr + KEY_EXPONENT) + SPLIT_EXPONENT)
    dv *= power_of_two(-tl.load(key_scales_ptr + VALUE_EXPONENT) + SPLIT_EXPONENT)
    dk_desc.store([batch, kv_head, first, 0], dk.reshape(1, 1, ROWS, D))
    dv_desc.store([batch, kv_head, first, 0], dv.reshape(1, 1, ROWS, E))


def split_keys(k: Tensor, v: Tensor, key_range: KeyRange, rows: int = 128) -> tuple[Tensor, Tensor]:
    """Pieces of keys (b, t, h_kv, d) and values (b, t, h_kv, e), scaled: (2 b, t, h_kv, d) and (2 b, t, h_kv, e)."""
    batch, length, heads, dim = k.shape
    d, e = block_dim(dim), block_dim(v.shape[-1])
    k_pieces, v_pieces = (empty_aligned(x, 2 * batch, length, heads, x.shape[-1], dtype=torch.float16) for x in (k, v))
    launch(
        split_keys_kernel, flat_grid(ceil_div(length, rows), batch * heads),
        head_major(k, (rows, d)), head_major(v, (rows, e)), head_major(k_pieces, (rows, d)),
        head_major(v_pieces, (rows, e)), key_range.scales, length, batch, heads, D=d, E=e, ROWS=rows, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return k_pieces, v_pieces


def attend(
    q: Tensor, k: Tensor, v: Tensor, power: int, gates: Gates | None, key_range: KeyRange,
    *, rows: int, columns: int, warps: int, stages: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y (b, t, h, e) and the rows' denominators Σ_j B_ij (b, h, t), float32; arguments as in `forward.attend`."""
    batch, length, heads, dim = q.shape
    value_dim = v.shape[-1]
    d, e = block_dim(dim), block_dim(value_dim)
    kv_heads, tiles = k.shape[2], ceil_div(length, rows)
    k_pieces, v_pieces = split_keys(k, v, key_range)
    q_pieces = empty_aligned(q, 2 * batch, length, heads, dim, dtype=torch.float16)
    lengths = q.new_empty(batch, heads, tiles * rows)
    launch(
        split_queries_kernel, flat_grid(tiles, batch * heads),
        head_major(q, (rows, d)), head_major(q_pieces, (rows, d)), lengths, length, tiles * rows, batch, heads,
        D=d, ROWS=rows, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    y = empty_aligned(v, batch, length, heads, value_dim)
    denominator = q.new_empty(batch, heads, length)
    launch(
        forward_kernel, flat_grid(tiles, batch * heads),
        head_major(q_pieces, (rows, d)), head_major(k_pieces, (columns, d)), head_major(v_pieces, (columns, e)),
        head_major(y, (rows, e)), denominator, gates and gates.sums, gates and gates.to_end, lengths, key_range.bound,
        key_range.scales, length, tiles * rows, gates.to_end.shape[-1] if gates else 0, batch, heads,
        GROUP=heads // kv_heads, D=d, E=e, POWER=power, GATED=gates is not None, ROWS=rows, COLUMNS=columns,
        STAGES=stages, num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return y, denominator


def query_gradient(
    row_gradients: RowGradients, k: Tensor, v: Tensor, power: int, gates: Gates | None, key_range: KeyRange,
    *, rows: int, columns: int, warps: int, stages: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (b, t, h, d) and q_i · dq_i (b, h, t), from the pieces of keys and values that `split_keys` returns."""
    batch, heads, length = row_gradients.scale.shape
    d, e = block_dim(k.shape[-1]), block_dim(v.shape[-1])
    dq = empty_aligned(k, batch, length, heads, k.shape[-1], dtype=torch.float32)
    row_term = torch.empty_like(row_gradients.scale)
    launch(
        query_gradient_kernel, flat_grid(ceil_div(length, rows), batch * heads),
        head_major(row_gradients.q, (rows, d)), head_major(k, (columns, d)), head_major(v, (columns, e)),
        head_major(row_gradients.dy, (rows, e)), row_gradients.minus_delta, head_major(dq, (rows, d)), row_term,
        row_gradients.scale, gates and gates.sums, gates and gates.to_end, row_gradients.length, row_gradients.factor,
        key_range.bound, key_range.scales, row_gradients.scales, length, row_gradients.factor.shape[-1],
        gates.to_end.shape[-1] if gates else 0, batch, heads,
        GROUP=heads // k.shape[2], D=d, E=e, POWER=power, GATED=gates is not None, ROWS=rows, COLUMNS=columns,
        STAGES=stages, num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return dq, row_term


def key_gradient(
    row_gradients: RowGradients, k: Tensor, v: Tensor, power: int, gates: Gates | None, key_range: KeyRange,
    *, block_terms: Tensor | None = None, query_block: int = 0,
    rows: int, columns: int, warps: int, stages: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dk (b, t, h_kv, d), dv (b, t, h_kv, e) and k_j · dk_j (b, h_kv, t); `block_terms` as in `backward.key_gradient`
    for float16."""
    batch, heads, length = row_gradients.scale.shape
    kv_heads = k.shape[2]
    d, e = block_dim(k.shape[-1]), block_dim(v.shape[-1])
    dk = empty_aligned(k, batch, length, kv_heads, k.shape[-1], dtype=torch.float32)
    dv = empty_aligned(v, batch, length, kv_heads, v.shape[-1], dtype=torch.float32)
    column_term = k.new_empty(batch, kv_heads, length, dtype=torch.float32)
    launch(
        key_gradient_kernel, flat_grid(ceil_div(length, rows), batch * kv_heads),
        head_major(row_gradients.q, (columns, d)), head_major(k, (rows, d)), head_major(v, (rows, e)),
        head_major(row_gradients.dy, (columns, e)), row_gradients.minus_delta, head_major(dk, (rows, d)),
        head_major(dv, (rows, e)), column_term, gates and gates.sums, gates and gates.from_start, row_gradients.factor,
        key_range.scales, row_gradients.scales, block_terms, length, row_gradients.factor.shape[-1],
        gates.from_start.shape[-1] if gates else 0, batch, kv_heads, query_block,
        GROUP=heads // kv_heads, D=d, E=e, POWER=power, GATED=gates is not None,
        BLOCK_TERMS=block_terms is not None, ROWS=rows, COLUMNS=columns, STAGES=stages, num_warps=warps,
        num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return dk, dv, column_term
