"""`CapturedCalls`: the functions of one object that run as CUDA graphs, with memory that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sympow.generation.decoder import CapturedCall


class CapturedCalls:
    """Calls functions of fixed tensors, with a graph for each function and its arguments, as `CapturedCall` has it.

    Functions write their results to tensors that exist before, so that all graphs can share one pool.

    Args:
        capture: whether to capture graphs at all.
        optional: as in `CapturedCall`.
    """

    def __init__(self, *, capture: bool, optional: bool) -> None:
        self._capture, self._optional = capture, optional
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._calls: dict[tuple[object, ...], CapturedCall] = {}

    def __call__(self, function: Callable[..., None], *arguments: object) -> None:
        key = (function.__name__, *arguments)
        if key not in self._calls:
            # Not a lambda, through which an error's traceback would keep the function's object and its tensors alive.
            call = partial(function, *arguments)
            self._calls[key] = CapturedCall(call, capture=self._capture, pool=self._pool, optional=self._optional)
        self._calls[key]()

    def clear(self) -> None:
        """Drops the graphs, which refer to the tensors, so that their memory can be freed."""
        self._calls.clear()
