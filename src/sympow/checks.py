"""Checks of arguments that every part of the package makes: what came, and what was expected."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_at_least(name: str, value: int, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}")


def check_finite(name: str, value: float) -> None:
    """A number that is neither infinite nor NaN, which every comparison would let pass."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # An int beyond every float compares too, where math.isfinite would fail.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {value}")
