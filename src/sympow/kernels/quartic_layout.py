"""How the degree-4 features of p = 4 are laid out as blocks of matrix products.

A monomial x_i x_j x_a x_b with i ≤ j ≤ a ≤ b is an *outer* pair (i, j) times an *inner* pair (a, b). Outer pairs stand
in order of j, inner pairs in order of a, so that an outer pair needs just the inner pairs from some column on, and
needs fewer the further down its list it stands:
    φ(q) · φ(k) = Σ_outer q_o k_o Σ_{inner from a = j} c_(o,m) q_m k_m,    c: multinomial coefficients.
Outer pairs are taken `pairs` at a time, all with the columns that the first of them needs; inner columns in tiles of
`COLUMNS`, counted from the end of the list. What is computed too much that way has coefficient 0. A state is a list of
such tiles, (tiles · COLUMNS, pairs · e): tile after tile of a block of outer pairs, block after block.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Inner columns per tile. With 64, heads of 32 would take 18 % more products, heads of 16 half as many again.
COLUMNS = 32
# Outer pairs per block of the states of denominators, whose value dimension is 1.
NORMALIZER_PAIRS = 64


@dataclass(frozen=True)
class Tiles:
    """Sizes that fit a Hopper GPU: the width of a product over values and outer pairs, and arguments of launchers."""

    width: int
    update: dict[str, Any]
    query: dict[str, Any]
    outer: dict[str, Any]
    inner: dict[str, Any]


def tiles_for(dim: int, value_dim: int) -> Tiles:
    """By head dimension: heads of 16 have short lists, wide values take registers from wide products."""
    wide = dim > 16 and value_dim <= 64
    warps = {"warps": 4 if dim == 16 and value_dim <= 32 else 8}
    return Tiles(256 if wide else 128, {"columns": 64, "warps": 4}, query=warps, outer={"warps": 8}, inner=warps)


@dataclass(frozen=True)
class PairLists:
    """The two lists of pairs of entries of a vector.

    Attributes:
        inner: entries (a, b) of each inner column, (2, inner columns) int32; −1 in padding, which comes first.
        outer: entries (i, j) of each outer pair, (2, outer columns) int32; −1 in padding, which comes last.
        inner_column: where the pair {a, b} stands, (d, d) int32.
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
        block_tile: for each block, the tile that its column 0 has or would have, (blocks,) int32.
        column_blocks: how many blocks, the first of all, have a tile of inner columns, (tiles of columns,) int32.
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
        for column, (low, high) in enumerate(pairs):
            if low >= 0:
                columns[low, high] = columns[high, low] = column
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
def update_strips(dim: int, pairs: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Strips of up to `width` inner columns that cover the tiles of each block: their first tiles, columns, blocks."""
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
    """How often the monomial occurs in (x · y)^4 if its indices are sorted, else 0, since it then stands elsewhere."""
    if min(outer + inner) < 0 or outer[1] > inner[0]:
        return 0.0
    return math.factorial(4) / math.prod(math.factorial(n) for n in Counter(outer + inner).values())


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
