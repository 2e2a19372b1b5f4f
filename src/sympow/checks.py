"""Checks of arguments that every part of the package makes: what came, and what was expected."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_regular_file(path: Path) -> None:
    """Refuses a folder, a device or a pipe before it is opened: opening a pipe waits for somebody to write into it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")


def check_at_least(name: str, value: int, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}")
    check_at_most(name, value, 2**63 - 1, "which is the largest 64-bit integer")


def check_at_most(name: str, value: int, largest: int, why: str) -> None:
    """Refuses a number that nothing could be done with, before memory or time is spent on it.

    Args:
        why: what the limit is, as a clause that follows it.
    """
    if value > largest:
        # A number of thousands of digits is not worth reading, and Python would not print it.
        got = f"{value:,}" if value < 10**30 else f"a number of {value.bit_length():,} bits"
        raise ValueError(f"{name} must be at most {largest:,}, {why}; got {got}")


def check_finite(name: str, value: float) -> None:
    """A number that is neither infinite nor NaN, which every comparison would let pass."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # An int beyond every float compares too, where math.isfinite would fail.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {value}")
