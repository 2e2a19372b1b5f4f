"""Powers of two that keep float16 arithmetic in range: float16 has five bits of exponent where bfloat16 has eight.

The largest float16 number is 65,504 and the smallest normal one 2^-14; below, precision decreases to an absolute 2^-25.
Weights B_ij, states and gradients have no such limits. So the kernels multiply what they round to float16 by powers of
two, which is exact, and undo these scales on float32 sums. A scale is computed from an upper bound of the numbers that
it scales (Cauchy–Schwarz), and never depends on rounding. Numbers 2^29 times smaller than their bound lose precision,
and numbers 2^40 times smaller become zero. If a row's largest weight becomes zero, the row is lost: it has output 0 and
no gradients. With p = 2 this takes a query whose cosines with all its keys are below 2^-20; with p = 4, below 2^-10. So
for p > 2 the weights in the tile of the diagonal, where the first rows of a document have all their keys, are scaled up
by powers of two that depend on the weights themselves (`exponent_to_limit`); `is_lost` finds the rows that remain.

- Weights: each row's query is scaled so that no weight exceeds 2^15. The bound of a key's weight is
      |q_i · k_j|^p exp(G_i − G_j) ≤ (|q_i| M_i)^p,    M_i = max_{j≤i} |k_j| exp((G_i − G_j) / p),
  a running maximum, as in plain PyTorch: no row depends on later keys, and long keys that gates have erased do not push
  later, shorter ones out of range. For keys before the tile of the diagonal, decays are counted from the first row r of
  the tile, and the bound is M_r; on the diagonal it is M_i (`row_exponent`).
- States S and Z (p = 2): |S_ia| ≤ Σ_j max|k_j|² max|v_j|, one scale per head. The left operands k_i v of the sums are
  scaled by the largest entries of keys and values.
- Gradients. The denominators w_i = Σ_j B_ij are known here. Queries are scaled so that w_i^(1/p) is about K, the norm
  of the longest key; then entries of a query are not small only because there are many keys, or long ones. Output
  gradients dy''_i = 2^-e_i dy_i have largest entries between 2^(3−p) and 16, with e_i such that 2^e_i / w_i is a power
  of 2^p. A sum over queries must multiply each term by this factor 2^e_i / w_i. The factor is applied to the float32
  weights before they are rounded, and not to dy: dv_j = Σ_i (B_ij 2^(g + e_i) / w_i) dy''_i 2^-g, with one g per head.
  g is chosen so that these weights, and the weights T_ij dB_ij 2^(g + e_i) of the queries (`attention.backward` defines
  T and dB), stay in range. On Hopper the query is multiplied by the p-th root of the factor instead, which is
  equivalent (`hopper.decayed`). dy''_i · v_j − δ''_i is divided by a bound of the values, one per head.
- Gradients of states are bounded, and so scaled, like states.

Outputs do not depend on the scale of a query. Returned weights, and states that are read or returned, are in float32
and without any of these scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import LOG2_E, power_of_two_scale, split_program_id
from sympow.kernels.launch import block_dim, ceil_div, empty_aligned, flat_grid, head_major, launch
from sympow.kernels.running_sums import SCAN_BLOCK, Gates

# log2 of the largest weight.
WEIGHT_LIMIT = tl.constexpr(15.0)
# log2 of the largest factor that brings the weights of a row up to that limit.
MOST_LIFT = tl.constexpr(100.0)
# log2 of the largest state, which is a sum of many numbers.
STATE_LIMIT = tl.constexpr(14.0)
# Stands for log2 of the norm of a vector of zeros.
NO_LENGTH = tl.constexpr(-1000.0)
# log2 of the largest 2^(g + e_i); and log2 of the factor by which dy'' · v − δ'' is divided beyond the bound of the
# values. dy'' · v has up to 128 terms of up to 16 times that bound, so the products of both are below 2^16.
GRADIENT_LIMIT = tl.constexpr(11.0)
VALUE_MARGIN = tl.constexpr(8.0)
# log2 of the largest score to the power p − 1 in the gradient of queries, where dy'' · v − δ'' is below 2^4.
QUERY_LIMIT = tl.constexpr(11.0)
# For float32 split into float16 pieces (`attention.split_float32`): log2 of the norm of the longest key and of the
# largest entry of a value; and log2 of w_i^(1/p), approximately: with queries this long, the lower pieces of their
# entries are normal numbers, too.
SPLIT_EXPONENT = tl.constexpr(4.0)
SPLIT_WEIGHT_EXPONENT = tl.constexpr(10.0)
# For the gradient of keys on Hopper, where a query is multiplied by the p-th root of its factor: log2 of the norm of
# the longest key; log2 of the largest entry of such a query; and log2 of how far below 2^GRADIENT_LIMIT the other
# queries may be scaled because of one query with a large entry.
FACTORED_EXPONENT = tl.constexpr(4.0)
FACTORED_LIMIT = tl.constexpr(15.0)
FACTORED_LOSS = tl.constexpr(12.0)
# Columns of `KeyRange.scales`, and their number.
KEY_EXPONENT = tl.constexpr(0)
VALUE_EXPONENT = tl.constexpr(1)
KV_SCALE = tl.constexpr(2)
NORMALIZER_SCALE = tl.constexpr(3)
TOKEN_SCALE = tl.constexpr(4)
SCALES = tl.constexpr(5)
# Columns of `RowGradients.scales`, and their number.
VALUE_FACTOR = tl.constexpr(0)
KEY_LENGTH = tl.constexpr(1)
GRADIENT_FACTOR = tl.constexpr(2)
D_KV_SCALE = tl.constexpr(3)
D_NORMALIZER_SCALE = tl.constexpr(4)
D_TOKEN_SCALE = tl.constexpr(5)
KEY_UNIT = tl.constexpr(6)
FACTORED_VALUE_FACTOR = tl.constexpr(7)
GRADIENT_SCALES = tl.constexpr(8)


@dataclass(frozen=True)
class KeyRange:
    """Bounds of keys and values, and the scales that follow from them.

    Attributes:
        bound: log2 M_i, (b, h_kv, t) float32.
        scales: scales per head, (b, h_kv, SCALES) float32: log2 of the norm of the longest key, rounded up; log2 of the
            largest entry of a value, rounded up; and the factors of S, of Z and of the transposed keys that S is
            computed from.
        token_scales: the `power_of_two_scale` of each key and of each value, at most 2^14, (b, h_kv, 2, t) float16; or
            None.
    """

    bound: Tensor
    scales: Tensor
    token_scales: Tensor | None = None

    @property
    def of_states(self) -> StateScales:
        columns = (SCALES, KV_SCALE, NORMALIZER_SCALE, TOKEN_SCALE)
        return StateScales(self.scales, *(x.value for x in columns))


class StateScales(NamedTuple):
    """The columns of a tensor, with one row per key head, that hold the scales of states or of their gradients.

    Attributes:
        tensor: `KeyRange.scales` or `RowGradients.scales`.
        columns: the number of its columns.
        kv_column, normalizer_column, token_column: the columns of the scales of S, of Z and of transposed tokens.
    """

    tensor: Tensor
    columns: int
    kv_column: int
    normalizer_column: int
    token_column: int


@triton.jit
def power_of_two(exponent):
    """2^exponent in float32, exact, for integers of any type between −126 and 127."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_to_limit(most, LIMIT: tl.constexpr):
    """The largest integer r from 0 to MOST_LIFT with 2^r `most` < 2^LIMIT, float32; 0 if there is none."""
    exponent = ((most.to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)  # most < 2^exponent
    lift = tl.minimum(tl.maximum(-exponent + LIMIT, 0.0), MOST_LIFT)
    return tl.where(most == 0, 0.0, lift)


@triton.jit
def is_lost(earlier, total):
    """Whether float16 is too coarse for the weights of a row: all are tiny, and some of those that count belong to keys
    before the tile of the diagonal, where weights are not scaled up.

    Args:
        earlier: sum of the row's weights before the diagonal, in the scale of the diagonal.
        total: sum of all its weights, in the same scale.
    """
    return (total < 2.0**-20) & (earlier > total * 2.0**-12)


@triton.jit
def row_exponent(length, bound, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """The largest integer r with (2^r |q| M)^POWER ≤ 2^LIMIT, float32, from log2 |q| and log2 M.

    The norm of a query times 2^r is at most 2^11: if all keys so far are zero or short, its scores with later, longer
    keys then do not overflow in float32 before they are scaled down.
    """
    MOST: tl.constexpr = 24 if POWER < 6 else 120 // POWER
    exponent = tl.minimum(tl.floor(-length - bound + LIMIT / POWER), tl.floor(-length + 11.0))
    return tl.minimum(tl.maximum(exponent, -MOST), MOST)


@triton.jit
def exponent_change(length, exponent, row_bound, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """`row_exponent` for log2 M = `row_bound` minus `exponent`, limited so that 2^(change · POWER) is finite."""
    MOST: tl.constexpr = 120 // POWER
    change = row_exponent(length, row_bound, LIMIT, POWER) - exponent
    return tl.minimum(tl.maximum(change, -MOST), MOST)


@triton.jit
def exponents(length, bound, row_bound, LIMIT: tl.constexpr, POWER: tl.constexpr):
    """`row_exponent` for log2 M = `bound`, and the change from it to that for `row_bound`."""
    first = row_exponent(length, bound, LIMIT, POWER)
    return first, exponent_change(length, first, row_bound, LIMIT, POWER)


@triton.jit
def query_exponents(length, bound, row_bound, key_length, log_decay, POWER: tl.constexpr):
    """The integer r with (2^r |q_i · k_j|)^(p−1) exp(G_r − G_j) ≤ 2^QUERY_LIMIT before the diagonal, and its change on
    it, where exp(G_i − G_j) counts.

    The weight of a row is known here and gives a second bound, B_ij ≤ w_i, which is about K^p.

    Args:
        length, bound, row_bound: log2 |q_i|, log2 M_r and log2 M_i.
        key_length: K. dy'' · v − δ'' is K times larger than QUERY_LIMIT assumes, and 2^r is divided by K elsewhere.
        log_decay: log2 exp(G_r − G_i).
    """
    MOST: tl.constexpr = 40 if POWER < 4 else 120 // POWER
    known = log_decay * 0.0 + (tl.log2(key_length) + 0.6)
    most = tl.minimum(length + bound, known + log_decay / POWER)
    first = tl.minimum(tl.maximum(tl.floor(-most + QUERY_LIMIT / (POWER - 1)), -MOST), MOST)
    most = tl.minimum(length + row_bound, known)
    second = tl.minimum(tl.maximum(tl.floor(-most + QUERY_LIMIT / (POWER - 1)), -MOST), MOST)
    return first, second - first


@triton.jit
def log_length(x, IN_RANGE: tl.constexpr = False):
    """log2 of the Euclidean norm of each row, float32; NO_LENGTH for zeros.

    IN_RANGE: promises that squares of x are normal float32 numbers, as squares of float16 numbers are.
    """
    if IN_RANGE or x.dtype == tl.float16:
        x = x.to(tl.float32)
        total = tl.sum(x * x, axis=1)
        found = tl.log2(tl.where(total == 0, 1.0, total)) * 0.5
    else:
        scale = power_of_two_scale(x)
        x = x.to(tl.float32) * tl.expand_dims(scale, 1)
        total = tl.sum(x * x, axis=1)
        found = tl.log2(tl.where(total == 0, 1.0, total)) * 0.5 - tl.log2(scale)
    return tl.where(total == 0, NO_LENGTH, found)


@triton.jit
def _power(x, POWER: tl.constexpr):
    result = x
    for _ in tl.static_range(POWER - 1):
        result *= x
    return result


@triton.jit
def store_pieces(desc, x, batch, batches, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Stores x (ROWS, D) float32 as two float16 tensors whose sum it is, `batches` apart in the batch dimension."""
    coarse = x.to(tl.float16)
    desc.store([batch, head, first, 0], coarse.reshape(1, 1, ROWS, D))
    fine = (x - coarse.to(tl.float32)).to(tl.float16)
    desc.store([batch + batches, head, first, 0], fine.reshape(1, 1, ROWS, D))


@triton.jit
def _finite(x):
    """x ≥ 0 where it is finite, else 0: infinite and NaN inputs must not change the scales of other tokens."""
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def measure_kernel(
    k_desc, v_desc, gate_sums_ptr, length_ptr, relative_ptr, parts_ptr, token_scale_ptr, length, heads, tiles,
    POWER: tl.constexpr, GATED: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """log2 |k_j| of a tile of tokens, and over the tile: max (log2 |k_j| − G_j / (p log 2)); max log2 |k_j|; largest
    entries of keys and of values; Σ max|k_j|² and Σ max|k_j|² max|v_j|. Without VALUES, all values count as 0."""
    tile, sequence = split_program_id(tiles, tl.int32)
    batch, head = sequence // heads, sequence % heads
    base = sequence.to(tl.int64) * length
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    mask = rows < length
    k = k_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    norm = log_length(k)
    norm = tl.where(norm < float("inf"), norm, NO_LENGTH)
    tl.store(length_ptr + base + rows, norm, mask=mask)
    relative = norm.to(tl.float64)
    if GATED:
        relative -= tl.load(gate_sums_ptr + base + rows, mask=mask, other=0.0) * (LOG2_E / POWER)
    # Without this, keys of zeros after strong gates would count as long.
    relative = tl.where(mask & (norm > NO_LENGTH), relative, NO_LENGTH)
    entry = _finite(tl.max(tl.abs(k.to(tl.float32)), axis=1))
    part = sequence.to(tl.int64) * tiles + tile
    tl.store(relative_ptr + part, tl.max(relative, axis=0))
    parts_ptr += part * 5
    tl.store(parts_ptr, tl.max(norm, axis=0))
    tl.store(parts_ptr + 1, tl.max(entry, axis=0))
    tl.store(parts_ptr + 3, tl.sum(entry * entry, axis=0))
    value = tl.zeros((ROWS,), tl.float32)
    if VALUES:
        v = v_desc.load([batch, head, first, 0]).reshape(ROWS, E)
        value = _finite(tl.max(tl.abs(v.to(tl.float32)), axis=1))
    tl.store(parts_ptr + 2, tl.max(value, axis=0))
    tl.store(parts_ptr + 4, tl.sum(entry * entry * value, axis=0))
    if token_scale_ptr is not None:
        token_scale_ptr += 2 * base + rows
        tl.store(token_scale_ptr, tl.minimum(power_of_two_scale(k), 2.0**14).to(tl.float16), mask=mask)
        tl.store(token_scale_ptr + length, tl.minimum(power_of_two_scale(v), 2.0**14).to(tl.float16), mask=mask)


@triton.jit
def bound_kernel(
    gate_sums_ptr, length_ptr, relative_ptr, parts_ptr, initial_ptr, bound_ptr, scales_ptr, length, blocks, tiles,
    POWER: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """log2 M_i of a block of tokens; the first block also computes `KeyRange.scales`.

    TILE: tokens per tile of `measure_kernel`, a divisor of BLOCK. INITIAL: the scales of S and Z also cover the largest
    entries of an initial state's S and Z.
    """
    block, sequence = split_program_id(blocks)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    mask = rows < length
    base = sequence * length
    earlier_bound = tl.full((BLOCK,), NO_LENGTH, tl.float64)
    earlier = block * (BLOCK // TILE)
    for start in range(0, earlier, BLOCK):
        index = start + tl.arange(0, BLOCK)
        earlier_bound = tl.maximum(
            earlier_bound, tl.load(relative_ptr + sequence * tiles + index, mask=index < earlier, other=-1000.0)
        )
    norm = tl.load(length_ptr + base + rows, mask=mask, other=-1000.0)
    relative = norm.to(tl.float64)
    decay = tl.zeros((BLOCK,), tl.float64)
    if GATED:
        decay = tl.load(gate_sums_ptr + base + rows, mask=mask, other=0.0) * (LOG2_E / POWER)
        relative = tl.where(norm > NO_LENGTH, relative - decay, NO_LENGTH)
    so_far = tl.maximum(tl.associative_scan(relative, 0, _larger), tl.max(earlier_bound, axis=0))
    tl.store(bound_ptr + base + rows, (so_far + decay).to(tl.float32), mask=mask)
    if block == 0:
        longest = tl.full((BLOCK,), NO_LENGTH, tl.float32)
        key = tl.zeros((BLOCK,), tl.float32)
        value = tl.zeros((BLOCK,), tl.float32)
        normalizer = tl.zeros((BLOCK,), tl.float32)
        kv = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tiles, BLOCK):
            index = start + tl.arange(0, BLOCK)
            parts = parts_ptr + (sequence * tiles + index) * 5
            inside = index < tiles
            longest = tl.maximum(longest, tl.load(parts, mask=inside, other=-1000.0))
            key = tl.maximum(key, tl.load(parts + 1, mask=inside, other=0.0))
            value = tl.maximum(value, tl.load(parts + 2, mask=inside, other=0.0))
            normalizer += tl.load(parts + 3, mask=inside, other=0.0)
            kv += tl.load(parts + 4, mask=inside, other=0.0)
        most_normalizer = tl.sum(normalizer, axis=0)
        most_kv = tl.sum(kv, axis=0)
        if INITIAL:
            most_kv += tl.load(initial_ptr + 2 * sequence)
            most_normalizer += tl.load(initial_ptr + 2 * sequence + 1)
        key_exponent = _exponent(tl.max(key, axis=0))
        value_exponent = _exponent(tl.max(value, axis=0))
        scales_ptr += sequence * SCALES
        most_length = tl.max(longest, axis=0)
        # If all keys are zero, the norm is arbitrary.
        most_length = tl.where(most_length == NO_LENGTH, 0.0, tl.ceil(most_length))
        tl.store(scales_ptr + KEY_EXPONENT, tl.minimum(tl.maximum(most_length, -90.0), 90.0))
        tl.store(scales_ptr + VALUE_EXPONENT, value_exponent)
        tl.store(scales_ptr + KV_SCALE, power_of_two(-_exponent(most_kv) + STATE_LIMIT))
        tl.store(scales_ptr + NORMALIZER_SCALE, power_of_two(-_exponent(most_normalizer) + STATE_LIMIT))
        tl.store(scales_ptr + TOKEN_SCALE, power_of_two(-key_exponent - tl.maximum(value_exponent, 0.0) + STATE_LIMIT))


@triton.jit
def _exponent(x):
    """log2 x rounded up, between −90 and 90: float32."""
    return tl.minimum(tl.ceil(tl.log2(tl.maximum(x, 2.0**-90))), 90.0)


def measure_keys(
    k: Tensor, v: Tensor, power: int, gates: Gates | None, initial: Tensor | None = None, *, values: bool = True,
    token_scales: bool = False, rows: int = 128,
) -> KeyRange:  # fmt: skip
    """The `KeyRange` of keys (b, t, h_kv, d) and values (b, t, h_kv, e).

    Args:
        initial: the largest entries of an initial state's S and Z, (b, h_kv, 2) float32; None: no initial state.
        values: whether to read the values. Weights do not depend on them; states and gradients do.
        token_scales: whether to compute the scales of single tokens, which gradients through states need.
        rows: tokens per tile.
    """
    assert values or not token_scales
    batch, length, heads, dim = k.shape
    blocks, tiles = ceil_div(length, SCAN_BLOCK), ceil_div(length, rows)
    lengths = k.new_empty(batch, heads, length, dtype=torch.float32)
    relative = k.new_empty(batch, heads, tiles, dtype=torch.float64)
    parts = k.new_empty(batch, heads, tiles, 5, dtype=torch.float32)
    bound = torch.empty_like(lengths)
    scales = k.new_empty(batch, heads, SCALES.value, dtype=torch.float32)
    of_tokens = k.new_empty(batch, heads, 2, length, dtype=torch.float16) if token_scales else None
    d, e = block_dim(dim), block_dim(v.shape[-1])
    launch(
        measure_kernel, flat_grid(tiles, batch * heads),
        head_major(k, (rows, d)), head_major(v, (rows, e)) if values else None, gates and gates.sums, lengths, relative,
        parts, of_tokens, length, heads, tiles,
        POWER=power, GATED=gates is not None, VALUES=values, D=d, E=e, ROWS=rows, num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    launch(
        bound_kernel, flat_grid(blocks, batch * heads),
        gates and gates.sums, lengths, relative, parts, initial, bound, scales, length, blocks, tiles,
        POWER=power, GATED=gates is not None, INITIAL=initial is not None, BLOCK=SCAN_BLOCK, TILE=rows,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return KeyRange(bound, scales, of_tokens)


# Gradients ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowGradients:
    """The rows' queries and output gradients, scaled, with their factors, as the backward kernels read them.

    Attributes:
        q: queries, scaled, (b, t, h, d).
        scale: their scales, (b, h, t) float32.
        dy: 2^-e_i dy_i, (b, t, h, e).
        minus_delta: −δ'' times the factor of dy'' · v − δ'', (b, h, ≥ t) float32; zero from t on.
        length: log2 of the norm of each scaled query, (b, h, ≥ t) float32.
        factor: 2^e_i / w_i, (b, h, ≥ t) float32; zero from t on and for rows without weight or gradient.
        scales: scales per head, (b, h_kv, GRADIENT_SCALES) float32: the factor of dy'' · v − δ'', which includes K; K,
            the norm of the longest key, as a power of two; 2^g; the factors of the gradients of S and Z and of the
            transposed queries that they are computed from; and the factors of keys and of dy'' · v − δ'' for queries
            multiplied by the roots of their factors (`hopper.decayed`).
    """

    q: Tensor
    scale: Tensor
    dy: Tensor
    minus_delta: Tensor
    length: Tensor
    factor: Tensor
    scales: Tensor

    @property
    def of_states(self) -> StateScales:
        columns = (GRADIENT_SCALES, D_KV_SCALE, D_NORMALIZER_SCALE, D_TOKEN_SCALE)
        return StateScales(self.scales, *(x.value for x in columns))


@triton.jit
def prepare_float16_kernel(
    q_desc, y_desc, dy_desc, denominator_ptr, d_denominator_ptr, key_scales_ptr, scaled_desc, scale_ptr, divided_desc,
    delta_ptr, length_ptr, factor_ptr, parts_ptr, length, padded, batches, heads,
    GROUP: tl.constexpr, POWER: tl.constexpr, D_DENOMINATOR: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """`RowGradients` of a tile of rows, and the tile's part of the bounds that `scales` is computed from.

    D_DENOMINATOR: the gradient of the rows' denominators is added to −δ. SPLIT: inputs are float32, results are for
    keys and values that `split_keys` scaled, and q and dy are stored in two pieces.
    """
    tiles = tl.cdiv(length, ROWS)
    LARGEST: tl.constexpr = 120 // POWER
    tile, sequence = split_program_id(tiles, tl.int32)
    first = tile * ROWS
    batch, head = sequence // heads, sequence % heads
    rows = first + tl.arange(0, ROWS)
    mask = rows < length
    base = sequence.to(tl.int64) * length
    key_scales_ptr += (batch * (heads // GROUP) + head // GROUP) * SCALES
    key_exponent = tl.load(key_scales_ptr + KEY_EXPONENT)
    value_exponent = tl.load(key_scales_ptr + VALUE_EXPONENT)
    denominator = tl.load(denominator_ptr + base + rows, mask=mask, other=0.0)
    value_unit = 1.0
    if SPLIT:
        denominator *= _power(power_of_two(-key_exponent + SPLIT_EXPONENT), POWER)
        value_unit = power_of_two(-value_exponent + SPLIT_EXPONENT)
        key_exponent = key_exponent * 0 + SPLIT_WEIGHT_EXPONENT
        value_exponent = value_exponent * 0 + SPLIT_EXPONENT
    value_factor = power_of_two(key_exponent - value_exponent - VALUE_MARGIN)

    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    log_denominator = tl.log2(tl.where(denominator == 0, 1.0, denominator)) / POWER
    exponent = tl.minimum(tl.maximum(tl.floor(-log_denominator + key_exponent + 0.5), -14.0), 14.0)
    exponent = tl.where(denominator == 0, 0.0, exponent)
    scale = power_of_two_scale(q) * power_of_two(exponent)
    scaled = q.to(tl.float32) * scale[:, None]
    if SPLIT:
        store_pieces(scaled_desc, scaled, batch, batches, head, first, ROWS, D)
    else:
        scaled_desc.store([batch, head, first, 0], scaled.to(q.dtype).reshape(1, 1, ROWS, D))
    tl.store(scale_ptr + base + rows, scale, mask=mask)
    # log2 of K / w^(1/p) for the scaled query, above 0 if the limits of the exponent kept w^(1/p) below K.
    short = tl.maximum(-log_denominator - exponent + key_exponent, 0.0)

    dy = dy_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    dy_scale = power_of_two_scale(dy) * 8.0
    factor = 1.0 / (dy_scale * tl.where(denominator == 0, 1.0, denominator) * power_of_two(exponent * POWER))
    if SPLIT:
        factor /= value_unit
    else:
        # The factor is rounded to a power of 2^p, whose p-th root is exact; dy is multiplied by the rest.
        rounded = power_of_two(tl.minimum(tl.maximum(tl.ceil(tl.log2(factor) / POWER), -LARGEST), LARGEST) * POWER)
        dy_scale *= tl.minimum(factor / rounded, 1.0)
        factor = rounded
    divided = (dy.to(tl.float32) * dy_scale[:, None]).to(dy.dtype)
    if SPLIT:
        store_pieces(divided_desc, divided, batch, batches, head, first, ROWS, E)
        dy_scale *= value_unit
    else:
        divided_desc.store([batch, head, first, 0], divided.reshape(1, 1, ROWS, E))
    y = y_desc.load([batch, head, first, 0]).reshape(ROWS, E)
    minus_delta = -tl.sum(divided.to(tl.float32) * y.to(tl.float32), axis=1)
    if SPLIT:
        minus_delta *= value_unit
    if D_DENOMINATOR:
        d_denominator = tl.load(d_denominator_ptr + base + rows, mask=mask, other=0.0)
        weight_gradient = d_denominator * tl.load(denominator_ptr + base + rows, mask=mask, other=0.0)
        minus_delta += weight_gradient * dy_scale
    minus_delta *= value_factor
    out = sequence.to(tl.int64) * padded + rows
    tl.store(delta_ptr + out, minus_delta)
    tl.store(length_ptr + out, log_length(scaled, IN_RANGE=True))
    size = tl.max(tl.abs(divided.to(tl.float32)), axis=1)
    if D_DENOMINATOR:
        size += tl.abs(minus_delta)
    # If the gradient of a row is zero, e_i is arbitrary and could make weights infinite.
    factor = tl.where((denominator == 0) | (size == 0), 0.0, factor)
    tl.store(factor_ptr + out, factor)

    # Rows with zero or non-finite gradients do not count for the scales.
    counts = (size > 0) & (size < float("inf")) & (denominator > 0) & (denominator < float("inf"))
    entry = tl.max(tl.abs(scaled), axis=1)
    if not SPLIT:
        # A query that is nearly orthogonal to all its keys becomes long when the root of its factor is multiplied in.
        reach = (
            -log_denominator * POWER
            + (key_exponent - FACTORED_EXPONENT + (1.0 - FACTORED_LIMIT)) * POWER
            + GRADIENT_LIMIT
        )
        short = tl.maximum(short, tl.minimum(reach, FACTORED_LOSS))
    parts_ptr += (sequence.to(tl.int64) * tiles + tile) * 4
    tl.store(parts_ptr, tl.max(tl.where(counts, -tl.log2(dy_scale) + short, NO_LENGTH), axis=0))
    tl.store(parts_ptr + 1, tl.max(tl.where(counts, factor * entry, 0.0), axis=0))
    tl.store(parts_ptr + 2, tl.sum(tl.where(counts, factor * entry * entry, 0.0), axis=0))
    tl.store(parts_ptr + 3, tl.sum(tl.where(counts, factor * entry * entry * tl.abs(minus_delta), 0.0), axis=0))


@triton.jit
def gradient_scales_kernel(
    parts_ptr, key_scales_ptr, d_final_ptr, scales_ptr, parts,
    POWER: tl.constexpr, D_FINAL: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr = False,
):  # fmt: skip
    """`RowGradients.scales` of a head, from the parts that `prepare_float16_kernel` wrote.

    D_FINAL: the scales also cover the largest entries of the gradients of a final state's S and Z.
    """
    sequence = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), NO_LENGTH, tl.float32)
    token = tl.zeros((BLOCK,), tl.float32)
    kv = tl.zeros((BLOCK,), tl.float32)
    normalizer = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < parts
        part = parts_ptr + (sequence * parts + index) * 4
        largest = tl.maximum(largest, tl.load(part, mask=inside, other=-1000.0))
        token = tl.maximum(token, tl.load(part + 1, mask=inside, other=0.0))
        kv += tl.load(part + 2, mask=inside, other=0.0)
        normalizer += tl.load(part + 3, mask=inside, other=0.0)
    key_scales_ptr += sequence * SCALES
    key_exponent = tl.load(key_scales_ptr + KEY_EXPONENT)
    value_exponent = tl.load(key_scales_ptr + VALUE_EXPONENT)
    exponent = tl.max(largest, axis=0)
    # If no row has a gradient, g is arbitrary.
    exponent = tl.where(exponent == NO_LENGTH, GRADIENT_LIMIT, tl.ceil(exponent))
    gradient = tl.floor(tl.minimum(tl.maximum(-exponent + GRADIENT_LIMIT, -100.0), 100.0) / POWER) * POWER
    factor = power_of_two(gradient)
    value_factor = power_of_two(key_exponent - value_exponent - VALUE_MARGIN)
    most_kv = tl.sum(kv, axis=0) * factor * 16.0
    most_normalizer = tl.sum(normalizer, axis=0) * factor
    if D_FINAL:
        most_kv += tl.load(d_final_ptr + 2 * sequence) * factor
        most_normalizer += tl.load(d_final_ptr + 2 * sequence + 1) * factor * value_factor
    scales_ptr += sequence * GRADIENT_SCALES
    tl.store(scales_ptr + VALUE_FACTOR, value_factor)
    tl.store(scales_ptr + KEY_LENGTH, power_of_two(key_exponent))
    tl.store(scales_ptr + GRADIENT_FACTOR, factor)
    # Products of these scales with 2^g must not overflow.
    most = -gradient + 100.0
    tl.store(scales_ptr + D_KV_SCALE, power_of_two(tl.minimum(-_exponent(most_kv) + STATE_LIMIT, most)))
    normalizer_exponent = -_exponent(most_normalizer) + STATE_LIMIT
    tl.store(scales_ptr + D_NORMALIZER_SCALE, power_of_two(tl.minimum(normalizer_exponent, most)))
    if SPLIT:
        # These two are for keys and values that `split_keys` scaled.
        unit = power_of_two(key_exponent * 0 + (SPLIT_WEIGHT_EXPONENT - SPLIT_EXPONENT - VALUE_MARGIN))
        tl.store(scales_ptr + VALUE_FACTOR, unit)
        tl.store(scales_ptr + KEY_LENGTH, power_of_two(key_exponent * 0 + SPLIT_WEIGHT_EXPONENT))
    tl.store(scales_ptr + KEY_UNIT, power_of_two(-key_exponent + FACTORED_EXPONENT))
    # Scores to the power p − 1 are below 2^(11 (p − 1) / p).
    MARGIN: tl.constexpr = 3.0 if POWER == 2 else 5.0 if POWER == 4 else 6.0
    tl.store(scales_ptr + FACTORED_VALUE_FACTOR, power_of_two(-value_exponent - MARGIN))
    # Transposed queries are multiplied by dy'' up to 16, or by −δ'' / K up to 16.
    token_exponent = -_exponent(tl.max(token, axis=0) * factor) + STATE_LIMIT - 4.0
    tl.store(scales_ptr + D_TOKEN_SCALE, power_of_two(tl.minimum(token_exponent, most)))


def prepare_float16(
    q: Tensor, y: Tensor, dy: Tensor, denominator: Tensor, d_denominator: Tensor | None, key_range: KeyRange,
    power: int, d_final: Tensor | None = None, split: bool = False, rows: int = 128,
) -> RowGradients:  # fmt: skip
    """`RowGradients` from queries q, outputs y with gradient dy, and the rows' denominators with gradient
    d_denominator.

    Args:
        key_range: the bounds of keys and values.
        d_final: the largest entries of the gradients of a final state's S and Z, (b, h_kv, 2) float32; None: there is
            no final state.
        split: whether inputs are float32: results are then for keys and values in pieces (`attention.split_float32`),
            and the returned q and dy are in two pieces.
        rows: rows per tile.
    """
    batch, length, heads, dim = q.shape
    tiles = ceil_div(length, rows)
    d, e = block_dim(dim), block_dim(y.shape[-1])
    pieces = (2 * batch if split else batch, length, heads)
    scaled = empty_aligned(q, *pieces, dim, dtype=torch.float16)
    divided = empty_aligned(dy, *pieces, dy.shape[-1], dtype=torch.float16)
    scale = q.new_empty(batch, heads, length, dtype=torch.float32)
    minus_delta, lengths, factor = (q.new_empty(batch, heads, tiles * rows, dtype=torch.float32) for _ in range(3))
    parts = q.new_empty(batch, heads, tiles, 4, dtype=torch.float32)
    kv_heads = key_range.scales.shape[1]
    scales = q.new_empty(batch, kv_heads, GRADIENT_SCALES.value, dtype=torch.float32)
    launch(
        prepare_float16_kernel, flat_grid(tiles, batch * heads),
        head_major(q, (rows, d)), head_major(y, (rows, e)), head_major(dy, (rows, e)), denominator, d_denominator,
        key_range.scales, head_major(scaled, (rows, d)), scale, head_major(divided, (rows, e)), minus_delta, lengths,
        factor, parts, length, tiles * rows, batch, heads,
        GROUP=heads // kv_heads, POWER=power, D_DENOMINATOR=d_denominator is not None, D=d, E=e, ROWS=rows, SPLIT=split,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    launch(
        gradient_scales_kernel, flat_grid(batch * kv_heads),
        parts, key_range.scales, d_final, scales, tiles * (heads // kv_heads),
        POWER=power, D_FINAL=d_final is not None, BLOCK=1024, SPLIT=split, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return RowGradients(scaled, scale, divided, minus_delta, lengths, factor, scales)
