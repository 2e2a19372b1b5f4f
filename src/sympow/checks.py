"""Argument checks that all packages share. Their messages name what was expected and what was given."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from sympow.errors import ArgumentError, ArgumentTypeError, UserError

DEVICES = ("cuda", "cpu")
SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ArgumentError(name, f"must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_regular_file(path: Path) -> None:
    """Raises a ValueError for a folder, a device or a pipe, since opening a pipe waits for a writer."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file")


def check_at_least(name: str, value: int, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(name, f"must be an int, got {type(value).__name__}")
    if value < smallest:
        raise ArgumentError(name, f"must be at least {smallest}, got {value}")
    check_at_most(name, value, 2**63 - 1, "which is the largest 64-bit integer")


def check_size(name: str, value: Any, smallest: int = 1) -> None:
    """As `check_at_least`, for a size that can also be one that torch.compile leaves open, which is no int."""
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise ArgumentTypeError(name, f"must be an int, got {type(value).__name__}")
    if value < smallest:
        raise ArgumentError(name, f"must be at least {smallest}, got {value}")


def check_row(row: int, rows: int) -> None:
    """Raises unless `row` is one of so many rows of a batch, counted from 0."""
    if not isinstance(row, int) or isinstance(row, bool):
        raise ArgumentTypeError("row", f"must be an int, got {type(row).__name__}")
    if not 0 <= row < rows:
        raise ArgumentError("row", f"must be between 0 and {rows - 1}, got {row}")


def check_positive(name: str, value: int) -> None:
    check_at_least(name, value, 1)


def check_at_most(name: str, value: int, largest: int, why: str) -> None:
    """Raises a ValueError for a number above a limit, before memory or time is spent on it.

    Args:
        why: the reason for the limit, as a clause that follows it in the message.
    """
    if value > largest:
        # Python refuses to print a number of thousands of digits.
        got = f"{value:,}" if value < 10**30 else f"a number of {value.bit_length():,} bits"
        raise ArgumentError(name, f"must be at most {largest:,}, {why}; got {got}")


def check_seed(seed: int) -> None:
    """Raises unless torch's generators take a seed: an integer of 64 bits, signed or unsigned."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ArgumentTypeError("seed", f"must be an int, got {type(seed).__name__}")
    if seed < SMALLEST_SEED:
        raise ArgumentError("seed", f"must be at least {SMALLEST_SEED:,}, the smallest 64-bit integer; got {seed:,}")
    check_at_most("seed", seed, LARGEST_SEED, "which is the largest 64-bit integer")


def check_bool(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(name, f"must be True or False, got {value!r}")


def check_str(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise ArgumentTypeError(name, f"must be a string, got {type(value).__name__}")


def check_finite(name: str, value: float) -> None:
    """Raises unless the value is a finite number. NaN would pass every comparison with a limit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(name, f"must be a number, got {type(value).__name__}")
    # math.isfinite would raise for an int beyond the largest float.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ArgumentError(name, f"must be finite, got {value}")


@dataclass(frozen=True)
class Range:
    """Annotates a number of a config with the values that it can have.

    Attributes:
        smallest: the least value.
        below: what it must stay below; None: no limit.
        largest: the greatest value; None: no limit.
        why: the reason for `largest`, as in `check_at_most`.
    """

    smallest: int = 0
    below: int | None = None
    largest: int | None = None
    why: str = ""


PositiveInt = Annotated[int, Range(1)]
NaturalInt = Annotated[int, Range()]
NonNegative = Annotated[float, Range()]
Decay = Annotated[float, Range(below=1)]


@cache
def _annotations(kind: type) -> dict[str, Any]:
    """Resolved once: this takes twice as long as all else that makes a config."""
    return get_type_hints(kind, include_extras=True)


def check_fields(config: Any) -> None:
    """Raises unless every field of a dataclass has a value that its annotation admits; `int` alone admits any."""
    # To mypy, classes are not hashable.
    for name, hint in _annotations(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        alternatives = get_args(hint)
        if NoneType in alternatives:
            if value is None:
                continue
            hint = alternatives[0]
        limits: Any = next(iter(getattr(hint, "__metadata__", ())), None)
        kind = hint.__origin__ if limits else hint
        if get_origin(kind) is Literal:
            check_choice(name, value, get_args(kind))
        elif kind is bool:
            check_bool(name, value)
        elif kind is str:
            check_str(name, value)
        elif kind is int and limits:
            check_at_least(name, value, limits.smallest)
            if limits.largest is not None:
                check_at_most(name, value, limits.largest, limits.why)
        elif kind is float:
            check_finite(name, value)
            if limits and (value < limits.smallest or (limits.below is not None and value >= limits.below)):
                below = "" if limits.below is None else f" and below {limits.below}"
                raise ArgumentError(name, f"must be at least {limits.smallest}{below}, got {value}")


def choose_device(device: str | None) -> str:
    """The device to compute on: the one asked for, or by default a GPU if torch finds one.

    Args:
        device: "cuda", "cpu" or None.

    Raises:
        ValueError: it is another name, or there is no GPU.
    """
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", "must be 'cpu' here: torch finds no GPU it can use; got 'cuda'")
    return device
