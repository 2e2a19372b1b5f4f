"""Serving: `Engine`, continuous batching of requests with prompts, settings and lengths of their own."""

from sympow.serving.engine.completion import Completion, Event, Prefilling, RequestError, Result, TokenLogprob, Usage
from sympow.serving.engine.engine import Engine, EngineStats
from sympow.serving.engine.request import Request
from sympow.serving.engine.scheduler import EngineClosedError, QueueFullError

__all__ = [
    "Completion",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Event",
    "Prefilling",
    "QueueFullError",
    "Request",
    "RequestError",
    "Result",
    "TokenLogprob",
    "Usage",
]
