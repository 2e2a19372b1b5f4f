"""Work done ahead of time in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, up to `depth` of them made ahead; an error comes in place of the item that it belongs to.

    Closing the generator, which happens when nobody holds it any more, ends the thread.
    """
    if depth == 0:
        yield from items
        return
    # A single thread: the items are made in order.
    pool = ThreadPoolExecutor(1, thread_name_prefix="sympow-prefetch")
    # In a list, so that its end is told from any item.
    made = ([item] for item in items)
    try:
        pending: deque[Future[list[T]]] = deque(pool.submit(next, made, []) for _ in range(depth))
        while item := pending.popleft().result():
            pending.append(pool.submit(next, made, []))
            yield item[0]
    finally:
        pool.shutdown(cancel_futures=True)
