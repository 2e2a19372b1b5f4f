"""Tile sizes of the attention and chunked forms on the portable kernels, by heads, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sympow.kernels.device_limits import KIB, Footprint, Limits, first_fitting, limits_of


@dataclass(frozen=True, kw_only=True)
class Tiles(Footprint):
    """Tile sizes that fit the registers and shared memory of a GPU: keyword arguments of each launcher.

    They are fixed, not autotuned: the few choices that matter were measured, and a first call should not stall.
    """

    states: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    query: dict[str, Any] = field(default_factory=dict)
    key: dict[str, Any] = field(default_factory=dict)


# Each begins with the tiles of an H200. The others were chosen by what compilers report (fewer spills), not timed.
NARROW = (
    Tiles(shared_memory=96 * KIB, asynchronous=True),
    Tiles(
        shared_memory=52 * KIB,
        forward={"warps": 8},
        query={"warps": 8, "registers": None},
    ),
)
WIDE = (
    Tiles(
        shared_memory=164 * KIB,
        asynchronous=True,
        states={"entries": 1, "stages": 2},
        forward={"warps": 8, "stages": 2},
        query={"rows": 64, "warps": 4, "stages": 2, "registers": None},
        key={"rows": 64, "warps": 8, "stages": 2},
    ),
    Tiles(
        shared_memory=96 * KIB,
        states={"entries": 1, "stages": 2},
        forward={"rows": 64, "warps": 8, "stages": 2},
        query={"rows": 64, "warps": 8, "stages": 2, "registers": None},
        key={"warps": 8, "stages": 2},
    ),
    Tiles(
        shared_memory=64 * KIB,
        states={"entries": 1, "stages": 1},
        forward={"rows": 64, "warps": 8, "stages": 1},
        query={"rows": 64, "warps": 8, "stages": 1, "registers": None},
        key={"warps": 8, "stages": 1},
    ),
)


# float32 operands take twice the shared memory, and their halves twice the registers. Where operands are read from
# registers, halves pass through shared memory; on sm_100 they lie in tensor memory, which tiles of 128 rows exceed.
# AMD's GPUs multiply float32 itself, without halves. With heads above 64, only Hopper has enough memory
# (`dispatch.wide_float32_unsupported_reason`).
_SMALL_FLOAT32: dict[str, Any] = {
    "states": {"entries": 1, "stages": 1},
    "forward": {"rows": 64, "warps": 8, "stages": 1},
    "query": {"rows": 64, "warps": 8, "stages": 1, "registers": None},
    "key": {"warps": 8, "stages": 1},
}
FLOAT32_NARROW = (
    Tiles(
        shared_memory=97 * KIB,
        instructions="wgmma",
        states={"entries": 1, "stages": 2},
        forward={"warps": 8, "stages": 2},
        query={"warps": 8, "stages": 2, "registers": None},
        key={"warps": 8, "stages": 2},
    ),
    Tiles(shared_memory=97 * KIB, **_SMALL_FLOAT32),
    Tiles(shared_memory=32 * KIB, instructions="mfma", **_SMALL_FLOAT32),
)
FLOAT32_WIDE = (
    Tiles(
        shared_memory=193 * KIB,
        instructions="wgmma",
        states={"entries": 1, "stages": 1, "warps": 8},
        forward={"rows": 64, "warps": 8, "stages": 1},
        query={"rows": 64, "warps": 8, "stages": 1, "registers": None},
        key={"rows": 64, "warps": 8, "stages": 1},
    ),
)

# `split_float32` has the same tiles everywhere; where operands are read from registers it takes less memory.
_PIECES: dict[str, Any] = {"rows": 64, "columns": 64, "warps": 4, "stages": 2}
FLOAT32_PIECES = (
    Tiles(shared_memory=130 * KIB, instructions="tcgen05", forward=_PIECES, query=_PIECES, key=_PIECES),
    Tiles(shared_memory=98 * KIB, instructions="wgmma", forward=_PIECES, query=_PIECES, key=_PIECES),
    Tiles(shared_memory=41 * KIB, forward=_PIECES, query=_PIECES, key=_PIECES),
)


def tiles_for(x: Tensor) -> Tiles:
    """The tiles for heads like those of x (…, d), keys and values alike, on its device."""
    return choose_tiles(x.shape[-1], limits_of(x), x.dtype)


def choose_tiles(dim: int, limits: Limits, dtype: torch.dtype = torch.bfloat16) -> Tiles:
    """The tiles for heads of `dim` entries on a GPU with these limits."""
    if dtype == torch.float32:
        return first_fitting(FLOAT32_WIDE if dim > 64 else FLOAT32_NARROW, limits)
    return first_fitting(WIDE if dim > 64 else NARROW, limits)


def tiles_in_pieces(x: Tensor) -> Tiles:
    """The tiles of `split_float32` on the device of x."""
    return first_fitting(FLOAT32_PIECES, limits_of(x))
