"""Checks of arguments that only data has."""

from __future__ import annotations

SPLITS = ("train", "heldout")


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def check_range(name: str, start: int, stop: int, length: int) -> None:
    """A range of tokens inside a document; slices would quietly give fewer."""
    if not 0 <= start <= stop <= length:
        raise ValueError(f"{name} has {length:,} tokens; tokens {start:,} to {stop:,} were asked for")
