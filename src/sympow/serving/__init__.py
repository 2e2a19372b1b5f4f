"""Serving: `Engine`, continuous batching of requests with prompts, settings and lengths of their own."""

from sympow.serving.engine.completion import Completion, Event, Prefilling, RequestError, Result, TokenLogprob, Usage
from sympow.serving.engine.engine import Engine
from sympow.serving.engine.request import Request
from sympow.serving.engine.scheduler import EngineClosedError, QueueFullError
from sympow.serving.engine.stats import EngineStats

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
