"""Serving: `Engine` decodes many requests as one batch, each with its own prompt, settings and length."""

from sympow.serving.completion import Completion, Event, RequestError, Result, TokenLogprob, Usage
from sympow.serving.engine import Engine, EngineClosedError, EngineStats, Prefilling, QueueFullError

__all__ = [
    "Completion",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Event",
    "Prefilling",
    "QueueFullError",
    "RequestError",
    "Result",
    "TokenLogprob",
    "Usage",
]
