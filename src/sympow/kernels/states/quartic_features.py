"""The features of p = 4: their layout as tiles of matrix products, and kernels that compute products of two entries.

A monomial x_i x_j x_a x_b with i ≤ j ≤ a ≤ b is an *outer* pair (i, j) times an *inner* pair (a, b). Outer pairs are
sorted by j, inner pairs by a, so that an outer pair needs the inner pairs from one column on, and later outer pairs
need fewer:
    φ(q) · φ(k) = Σ_outer q_o k_o Σ_{inner from a = j} c_(o,m) q_m k_m,    c: multinomial coefficients.
Outer pairs are processed in blocks of `pairs`, each with the columns that its first pair needs; inner columns in tiles
of `COLUMNS`, counted from the end of the list. Features that are computed in excess have coefficient 0. A state is a
list of such tiles, (tiles · COLUMNS, pairs · e): all tiles of a block of outer pairs, block after block.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import dot_precision, split_program_id
from sympow.kernels.device_limits import KIB, Footprint, Limits, first_fitting
from sympow.kernels.launch import ceil_div, flat_grid, launch

# Inner columns per tile. With 64, heads of 32 would take 18 % more products, heads of 16 half as many again.
COLUMNS = 32
# Outer pairs per block of the states of denominators, whose value dimension is 1.
NORMALIZER_PAIRS = 64


@dataclass(frozen=True)
class Tiles(Footprint):
    """Tile sizes: the width of a product over values and outer pairs, and arguments of launchers."""

    width: int
    update: dict[str, Any]
    query: dict[str, Any]
    outer: dict[str, Any]
    inner: dict[str, Any]


def quartic_tiles_for(dim: int, value_dim: int, limits: Limits, dtype: torch.dtype = torch.bfloat16) -> Tiles:
    """By head dimension: heads of 16 have short lists, wide values take registers from wide products. The tiles of an
    H200, or where products take their operands from registers narrower products."""
    wide = dim > 16 and value_dim <= 64
    warps = {"warps": 4 if dim == 16 and value_dim <= 32 else 8}
    update = {"columns": 64, "warps": 4}
    # With at most 128 registers per thread, two CTAs fit on a multiprocessor; without this limit it takes 132.
    outer = {"warps": 8, "registers": 128 if dim == value_dim == 16 else None}
    measured = (256 if wide else 128, update, warps, outer, warps)
    narrow = (128, update, warps, {"warps": 8}, warps)
    if dtype == torch.float32:
        # AMD's GPUs multiply float32 itself; the others put both halves of an operand into shared memory.
        candidates = (
            Tiles(*measured, shared_memory=129 * KIB, instructions="wgmma"),
            Tiles(*narrow, shared_memory=98 * KIB),
            Tiles(*narrow, shared_memory=64 * KIB, instructions="mfma"),
        )
    else:
        candidates = (
            Tiles(*measured, shared_memory=116 * KIB, asynchronous=True),
            Tiles(*narrow, shared_memory=52 * KIB),
        )
    return first_fitting(candidates, limits)


@dataclass(frozen=True)
class PairLists:
    """The two lists of pairs of entries of a vector.

    Attributes:
        inner: entries (a, b) of each inner column, (2, inner columns) int32; −1 in padding, which comes first.
        outer: entries (i, j) of each outer pair, (2, outer columns) int32; −1 in padding, which comes last.
        inner_column: the column of the pair {a, b}, (d, d) int32.
        outer_column: likewise.
    """

    inner: Tensor
    outer: Tensor
    inner_column: Tensor
    outer_column: Tensor


@dataclass(frozen=True)
class StateLayout:
    """The tiles of a state with a certain number of outer pairs per block.

    Attributes:
        dim: d.
        pairs: outer pairs per block.
        tile_column: first inner column of each tile, (tiles,) int32.
        tile_block: the block of outer pairs of each tile, (tiles,) int32.
        block_tile: for each block, the index that the tile of column 0 has or would have, (blocks,) int32.
        column_blocks: how many blocks (always the first ones) have each tile of inner columns, (tiles of columns,)
            int32.
        weights: the coefficients c, (tiles · COLUMNS, pairs) float32.
    """

    dim: int
    pairs: int
    tile_column: Tensor
    tile_block: Tensor
    block_tile: Tensor
    column_blocks: Tensor
    weights: Tensor

    @property
    def rows(self) -> int:
        return self.weights.shape[0]

    @property
    def tiles(self) -> int:
        return self.tile_column.shape[0]


def inner_columns(dim: int) -> int:
    """Inner columns, padding included."""
    return _round_up(dim * (dim + 1) // 2, COLUMNS)


def outer_columns(dim: int) -> int:
    """Outer columns, padding included."""
    return _round_up(dim * (dim + 1) // 2, NORMALIZER_PAIRS)


@lru_cache(maxsize=16)
def pair_lists(dim: int, device: torch.device) -> PairLists:
    inner, outer = _inner_pairs(dim), _outer_pairs(dim)
    inner_column, outer_column = torch.zeros(2, dim, dim, dtype=torch.int32)
    for pairs, columns in ((inner, inner_column), (outer, outer_column)):
        for column, (i, a) in enumerate(pairs):
            if i >= 0:
                columns[i, a] = columns[a, i] = column
    lists = (torch.tensor(pairs, dtype=torch.int32).T.contiguous() for pairs in (inner, outer))
    return PairLists(*(x.to(device) for x in (*lists, inner_column, outer_column)))


@lru_cache(maxsize=32)
def state_layout(dim: int, pairs: int, device: torch.device) -> StateLayout:
    inner, outer = _inner_pairs(dim), _outer_pairs(dim)
    count = dim * (dim + 1) // 2
    tile_column: list[int] = []
    tile_block: list[int] = []
    block_tile: list[int] = []
    weights: list[list[float]] = []
    for block, start in enumerate(range(0, count, pairs)):
        first_needed = next(column for column, (a, _) in enumerate(inner) if a >= outer[start][1])
        first = first_needed // COLUMNS * COLUMNS
        block_tile.append(len(tile_column) - first // COLUMNS)
        for column in range(first, len(inner), COLUMNS):
            tile_column.append(column)
            tile_block.append(block)
            weights += [
                [_coefficient(pair, inner_pair) for pair in outer[start : start + pairs]]
                for inner_pair in inner[column : column + COLUMNS]
            ]
    column_blocks = [
        sum(first + column // COLUMNS >= start for first, start in zip(block_tile, _starts(tile_block), strict=True))
        for column in range(0, len(inner), COLUMNS)
    ]
    return StateLayout(
        dim=dim,
        pairs=pairs,
        tile_column=_table(tile_column, device),
        tile_block=_table(tile_block, device),
        block_tile=_table(block_tile, device),
        column_blocks=_table(column_blocks, device),
        weights=torch.tensor(weights, dtype=torch.float32).to(device),
    )


@lru_cache(maxsize=32)
def update_tiles(dim: int, pairs: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Wide tiles of up to `width` inner columns that cover the tiles of each block: first tile, column, block of
    each."""
    layout = state_layout(dim, pairs, torch.device("cpu"))
    step = width // COLUMNS
    blocks = layout.tile_block.tolist()
    chosen = [tile for tile, block in enumerate(blocks) if (tile - blocks.index(block)) % step == 0]
    tiles = torch.tensor(chosen, dtype=torch.int32)
    return tiles.to(device), layout.tile_column[tiles].to(device), layout.tile_block[tiles].to(device)


def _table(entries: list[int], device: torch.device) -> Tensor:
    return torch.tensor(entries, dtype=torch.int32).to(device)


def _starts(tile_block: list[int]) -> list[int]:
    """The first tile of each block."""
    return [tile_block.index(block) for block in range(tile_block[-1] + 1)]


def _inner_pairs(dim: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(dim) for b in range(a, dim)]
    return [(-1, -1)] * (inner_columns(dim) - len(pairs)) + pairs


def _outer_pairs(dim: int) -> list[tuple[int, int]]:
    pairs = [(i, j) for j in range(dim) for i in range(j + 1)]
    return pairs + [(-1, -1)] * (outer_columns(dim) - len(pairs))


def _coefficient(outer: tuple[int, int], inner: tuple[int, int]) -> float:
    """How often the monomial occurs in (x · y)^4 if its indices are sorted, else 0, since it is counted elsewhere."""
    if min(outer + inner) < 0 or outer[1] > inner[0]:
        return 0.0
    return math.factorial(4) / math.prod(math.factorial(n) for n in Counter(outer + inner).values())


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


# Tokens per tile of the kernels that query.
ROWS = 128
FEATURE_TOKENS = 64
FEATURE_COLUMNS = 64


@dataclass(frozen=True)
class PairFeatures:
    """What products read of queries or keys.

    Attributes:
        inner: x_a x_b times the token's decay, (b, h, ≥ t, inner columns).
        outer: x_i x_j, (b, h, outer columns, ≥ t).
    """

    inner: Tensor
    outer: Tensor


@dataclass(frozen=True)
class PairGradients:
    """Gradients of `PairFeatures`: inner (b, h, inner columns, ≥ t) and outer (b, h, outer columns, ≥ t)."""

    inner: Tensor
    outer: Tensor


@triton.jit
def _boundary_decay(sums_ptr, sequence, tokens, first_token, length, time, chunk, GATED: tl.constexpr):
    """exp(−|G_i − G_R|) with R the end of a token's chunk; tokens are counted from `first_token`, of `time` in all."""
    decay = tl.full(tokens.shape, 1.0, tl.float32)
    if GATED:
        sums_ptr += sequence.to(tl.int64) * time
        boundary = (tokens // chunk + 1) * chunk - 1
        mask = tokens < length
        own = tl.load(sums_ptr + first_token + tokens, mask=mask, other=0.0)
        reference = tl.load(sums_ptr + boundary, mask=mask, other=0.0)
        # The difference is taken in float64: sums grow with the length, only their differences matter.
        decay = tl.exp(-tl.abs((own - reference).to(tl.float32)))
    return decay


@triton.jit
def _products(x, index_ptr, columns, COUNT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """x_i x_j for a tile of tokens and columns, in float32; 0 for padding.

    Entries are selected by products with unit vectors, which is exact: gathers were four times slower.
    """
    inside = columns < COUNT
    first = tl.load(index_ptr + columns, mask=inside, other=-1)
    second = tl.load(index_ptr + COUNT + columns, mask=inside, other=-1)
    dims = tl.arange(0, D)[:, None]
    first_entry = tl.dot(x, (dims == first[None, :]).to(x.dtype), input_precision=PRECISION)
    return first_entry * tl.dot(x, (dims == second[None, :]).to(x.dtype), input_precision=PRECISION)


@triton.jit
def features_kernel(
    x_ptr, sums_ptr, inner_index_ptr, outer_index_ptr, inner_ptr, outer_ptr, stride_b, stride_t, stride_h,
    length, padded, time, first_token, heads, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Both lists of products for a tile of tokens."""
    tile, sequence = split_program_id(padded // TOKENS, tl.int32)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = batch * (heads // GROUP) + head // GROUP
    rows = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    rows += tokens.to(tl.int64)[:, None] * stride_t
    x = tl.load(rows + tl.arange(0, D)[None, :], mask=(tokens < length)[:, None], other=0.0)
    decay = _boundary_decay(sums_ptr, kv_sequence, tokens, first_token, length, time, chunk, GATED)
    inner_ptr += sequence.to(tl.int64) * padded * INNER
    outer_ptr += sequence.to(tl.int64) * padded * OUTER
    for start in range(0, INNER, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        product = _products(x, inner_index_ptr, columns, INNER, D, PRECISION) * decay[:, None]
        out = inner_ptr + tokens.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(out, product.to(inner_ptr.dtype.element_ty), mask=(columns < INNER)[None, :])
    for start in range(0, OUTER, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        product = _products(x, outer_index_ptr, columns, OUTER, D, PRECISION)
        out = outer_ptr + columns.to(tl.int64)[None, :] * padded + tokens[:, None]
        tl.store(out, product.to(outer_ptr.dtype.element_ty))


@triton.jit
def pull_back_kernel(
    x_ptr, sums_ptr, inner_column_ptr, outer_column_ptr, d_inner_ptr, d_outer_ptr, dx_ptr, term_ptr,
    stride_b, stride_t, stride_h, dx_stride_b, dx_stride_t, dx_stride_h, term_stride_b, term_stride_h,
    length, padded, time, first_token, heads, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """dx_a = Σ_b (1 + [a = b]) d_ab x_b from the gradients d of the products, and x · dx."""
    tile, sequence = split_program_id(padded // TOKENS, tl.int32)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = batch * (heads // GROUP) + head // GROUP
    dims = tl.arange(0, D)
    present = tokens < length
    rows = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + tokens.to(tl.int64) * stride_t
    decay = _boundary_decay(sums_ptr, kv_sequence, tokens, first_token, length, time, chunk, GATED)
    d_inner_ptr += sequence.to(tl.int64) * padded * INNER
    d_outer_ptr += sequence.to(tl.int64) * padded * OUTER
    dx = tl.zeros((D, TOKENS), tl.float32)
    for b in range(D):
        inner = tl.load(inner_column_ptr + b * D + dims).to(tl.int64)[:, None] * padded
        outer = tl.load(outer_column_ptr + b * D + dims).to(tl.int64)[:, None] * padded
        d_inner = tl.load(d_inner_ptr + inner + tokens[None, :]).to(tl.float32)
        d_outer = tl.load(d_outer_ptr + outer + tokens[None, :]).to(tl.float32)
        twice = tl.where(dims == b, 2.0, 1.0)[:, None]
        entry = tl.load(rows + b, mask=present, other=0.0).to(tl.float32)
        dx += (d_inner * decay[None, :] + d_outer) * (entry[None, :] * twice)
    mask = present[None, :]
    x = tl.load(rows[None, :] + dims[:, None], mask=mask, other=0.0).to(tl.float32)
    out = dx_ptr + batch.to(tl.int64) * dx_stride_b + head.to(tl.int64) * dx_stride_h
    out += tokens.to(tl.int64) * dx_stride_t
    tl.store(out[None, :] + dims[:, None], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    terms = term_ptr + batch.to(tl.int64) * term_stride_b + head.to(tl.int64) * term_stride_h + tokens
    tl.store(terms, tl.sum(x * dx, axis=0), mask=present)


def pair_features(
    x: Tensor, sums: Tensor | None, first_token: int, kv_heads: int, chunk: int, lists: PairLists
) -> PairFeatures:
    """Products of two entries of x (b, t, h, d), whose first token is token `first_token` of the sequence.

    Args:
        sums: G of the whole sequence, (b, h_kv, time) float64, or None without gates.
    """
    batch, length, heads, dim = x.shape
    padded = ceil_div(length, ROWS) * ROWS
    inner = x.new_empty(batch, heads, padded, lists.inner.shape[1])
    outer = x.new_empty(batch, heads, lists.outer.shape[1], padded)
    launch(
        features_kernel, flat_grid(padded // FEATURE_TOKENS, batch * heads),
        x, sums, lists.inner, lists.outer, inner, outer, *x.stride()[:3],
        length, padded, 0 if sums is None else sums.shape[-1], first_token, heads, chunk,
        GROUP=heads // kv_heads, D=dim, INNER=inner.shape[-1], OUTER=outer.shape[2], GATED=sums is not None,
        PRECISION=dot_precision(x.dtype), TOKENS=FEATURE_TOKENS, COLUMNS=FEATURE_COLUMNS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return PairFeatures(inner, outer)


def pull_back(
    x: Tensor,
    gradient: PairGradients,
    sums: Tensor | None,
    first_token: int,
    kv_heads: int,
    chunk: int,
    lists: PairLists,
    dx: Tensor,
    terms: Tensor,
) -> None:
    """Writes dx (b, t, h, d) and x · dx (b, h, t) from the gradients of the products that `pair_features` computed."""
    batch, length, heads, dim = x.shape
    padded = gradient.inner.shape[-1]
    assert terms.stride(-1) == 1 and dx.stride(-1) == 1
    launch(
        pull_back_kernel, flat_grid(padded // FEATURE_TOKENS, batch * heads),
        x, sums, lists.inner_column, lists.outer_column, gradient.inner, gradient.outer, dx, terms,
        *x.stride()[:3], *dx.stride()[:3], *terms.stride()[:2],
        length, padded, 0 if sums is None else sums.shape[-1], first_token, heads, chunk,
        GROUP=heads // kv_heads, D=dim, INNER=gradient.inner.shape[2], OUTER=gradient.outer.shape[2],
        GATED=sums is not None, TOKENS=FEATURE_TOKENS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
