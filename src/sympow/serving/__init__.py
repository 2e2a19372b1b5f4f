"""Serving: `Engine` decodes many requests as one batch, each with its own prompt, settings and length."""

from sympow.serving.completion import Completion, Event, Prefilling, RequestError, Result, TokenLogprob, Usage
from sympow.serving.engine import Engine, EngineStats
from sympow.serving.scheduler import EngineClosedError, QueueFullError

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
