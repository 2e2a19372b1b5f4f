"""Checks of arguments, with messages that say what came and what was expected."""

from __future__ import annotations

from collections.abc import Iterable

SPLITS = ("train", "heldout")


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_at_least(name: str, value: int, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}")


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def check_range(name: str, start: int, stop: int, length: int) -> None:
    """A range of tokens inside a document; slices would quietly give fewer."""
    if not 0 <= start <= stop <= length:
        raise ValueError(f"{name} has {length:,} tokens; tokens {start:,} to {stop:,} were asked for")
