"""The server's metrics in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from sympow.serving.engine.engine import EngineStats
from sympow.serving.engine.scheduler import TTFT_BUCKETS
from sympow.serving.web.contexts import ContextStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


@dataclass
class HttpCounts:
    """Counts of responses by route and status, of open requests, and of requests whose clients disconnected."""

    responses: dict[tuple[str, int], int] = field(default_factory=dict)
    open: int = 0
    disconnected: int = 0

    def count(self, route: str, status: int) -> None:
        self.responses[route, status] = self.responses.get((route, status), 0) + 1


def exposition(stats: EngineStats, contexts: ContextStore, http: HttpCounts) -> str:
    """All metrics as text; called in the event loop."""
    lines = [
        *_gauge("slots", "Slots of the batch.", stats.slots),
        *_gauge("slots_running", "Requests that are being decoded.", stats.running),
        *_gauge("slot_bytes", "Bytes of a slot.", stats.slot_nbytes),
        *_gauge("prefilling", "Prompts and contexts that are being prefilled.", stats.prefilling),
        *_gauge("queue_length", "Requests that wait for a slot.", stats.queued),
        *_gauge("queue_limit", "The most requests that may wait.", stats.max_queue),
        *_counter("requests_submitted", "Choices that were accepted.", stats.submitted),
        *_counter("requests_rejected", "Choices that were refused because the queue was full.", stats.rejected),
        *_metric(
            "requests_finished_total",
            "counter",
            "Choices that ended, by finish reason.",
            [({"reason": reason}, count) for reason, count in sorted(stats.finished.items())],
        ),
        *_counter("prompt_tokens", "Tokens that were prefilled.", stats.prompt_tokens),
        *_counter("generated_tokens", "Tokens that were generated.", stats.generated_tokens),
        *_counter("steps", "Decoding steps.", stats.steps),
        *_time_to_first_token(stats),
        *_counter("prefix_cache_hits", "Prompts that started from the prefix cache.", stats.prefix_hits),
        *_counter("prefix_cache_misses", "Prompts that found no prefix in the cache.", stats.prefix_misses),
        *_counter("prefix_cache_hit_tokens", "Tokens that the cache saved prefilling.", stats.prefix_hit_tokens),
        *_gauge("prefix_cache_entries", "States in the prefix cache.", stats.prefix_entries),
        *_gauge("prefix_cache_bytes", "Bytes of the prefix cache.", stats.prefix_nbytes),
        *_gauge("prefix_cache_limit_bytes", "The most bytes of the prefix cache.", stats.prefix_budget),
        *_gauge("contexts_reading", "Contexts that are being prefilled.", contexts.reading),
        *_gauge("contexts_in_memory", "Contexts whose states are in memory.", contexts.in_memory),
        *_gauge("contexts_memory_bytes", "Bytes of these states.", contexts.nbytes),
        *_gauge("contexts_memory_limit_bytes", "The most bytes of states in memory.", contexts.budget),
        *_counter("context_hits", "Uses of a context that was in memory.", contexts.hits),
        *_counter("context_loads", "Uses of a context that was loaded from disk.", contexts.loads),
        *_counter("contexts_dropped", "Contexts evicted from memory; they stay on disk.", contexts.dropped),
        *_metric(
            "http_responses_total",
            "counter",
            "HTTP responses by route and status.",
            [({"route": route, "status": str(status)}, n) for (route, status), n in sorted(http.responses.items())],
        ),
        *_gauge("http_requests_open", "HTTP requests that are being answered, this one included.", http.open),
        *_gauge("tasks", "Tasks of the event loop.", len(asyncio.all_tasks())),
        *_counter("client_disconnects", "Requests whose clients disconnected before the end.", http.disconnected),
    ]
    return "\n".join(lines) + "\n"


def _time_to_first_token(stats: EngineStats) -> list[str]:
    """A histogram; buckets are cumulative in Prometheus."""
    name = "time_to_first_token_seconds"
    bounds = [*map(str, TTFT_BUCKETS), "+Inf"]
    counts = list(accumulate(stats.ttft_counts))
    samples = [(f"{name}_bucket", {"le": bound}, count) for bound, count in zip(bounds, counts, strict=True)]
    lines = [_sample(*sample) for sample in samples]
    lines += [_sample(f"{name}_sum", {}, stats.ttft_sum), _sample(f"{name}_count", {}, counts[-1])]
    return [*_header(name, "histogram", "Seconds from a request to its first token."), *lines]


def _gauge(name: str, description: str, value: float) -> list[str]:
    return _metric(name, "gauge", description, [({}, value)])


def _counter(name: str, description: str, value: float) -> list[str]:
    return _metric(f"{name}_total", "counter", description, [({}, value)])


def _metric(name: str, kind: str, description: str, samples: Iterable[tuple[Labels, float]]) -> list[str]:
    return [*_header(name, kind, description), *(_sample(name, labels, value) for labels, value in samples)]


def _header(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP sympow_{name} {description}", f"# TYPE sympow_{name} {kind}"]


def _sample(name: str, labels: Labels, value: float) -> str:
    # Values of labels come from fixed sets without quotes, backslashes and line ends.
    inside = ",".join(f'{key}="{label}"' for key, label in labels.items())
    return f"sympow_{name}{{{inside}}} {value}" if inside else f"sympow_{name} {value}"
