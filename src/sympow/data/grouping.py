"""Neighbours together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def group_by_size(items: Iterable[T], size_of: Callable[[T], int], largest: int) -> list[list[T]]:
    """Consecutive items in groups, each as large as it can be within `largest`; a larger item is by itself."""
    groups: list[list[T]] = []
    total = 0
    for item in items:
        size = size_of(item)
        if not groups or total + size > largest:
            groups.append([])
            total = 0
        groups[-1].append(item)
        total += size
    return groups
