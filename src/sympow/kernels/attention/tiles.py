"""Tiles that fit the registers and the shared memory of a Hopper GPU, by head dimension.

Fixed rather than searched for: the few choices that matter were measured, and a first call should not stall.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Tokens per tile of keys in every kernel that reads gates.
COLUMNS = 64


@dataclass(frozen=True)
class Tiles:
    """Keyword arguments of each launcher."""

    states: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    query: dict[str, Any] = field(default_factory=dict)
    key: dict[str, Any] = field(default_factory=dict)


NARROW = Tiles()
WIDE = Tiles(
    states={"entries": 1, "stages": 2},
    forward={"warps": 8, "stages": 2},
    query={"rows": 64, "warps": 4, "stages": 2, "registers": None},
    key={"rows": 64, "warps": 8, "stages": 2},
)


def tiles_for(dim: int) -> Tiles:
    """The tiles for heads of `dim` entries, keys and values alike."""
    return WIDE if dim > 64 else NARROW
