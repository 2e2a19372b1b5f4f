"""The server's metrics, which `prometheus_client` writes in Prometheus's text format."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sympow.serving.engine.engine import Engine
from sympow.serving.engine.stats import TTFT_BUCKETS
from sympow.serving.web.contexts import ContextStore
from sympow.serving.web.gatekeeping import HttpCounts


@dataclass(frozen=True, eq=False)
class ServerMetrics(Collector):
    """All metrics, read where they are counted when Prometheus asks for them; called in the event loop."""

    engine: Engine
    contexts: ContextStore
    http: HttpCounts

    def collect(self) -> Iterator[Metric]:
        stats, contexts, http = self.engine.stats(), self.contexts, self.http
        yield _gauge("slots", "Slots of the batch.", stats.slots)
        yield _gauge("slots_running", "Requests that are being decoded.", stats.running)
        yield _gauge("slot_bytes", "Bytes of a slot.", stats.slot_nbytes)
        yield _gauge("prefilling", "Prompts and contexts that are being prefilled.", stats.prefilling)
        yield _gauge("queue_length", "Requests that wait for a slot.", stats.queued)
        yield _gauge("queue_limit", "The most requests that may wait.", stats.max_queue)
        yield _counter("requests_submitted", "Choices that were accepted.", stats.submitted)
        yield _counter("requests_rejected", "Choices that were refused because the queue was full.", stats.rejected)
        finished = CounterMetricFamily(
            "sympow_requests_finished", "Choices that ended, by finish reason.", labels=["reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _counter("prompt_tokens", "Tokens that were prefilled.", stats.prompt_tokens)
        yield _counter("generated_tokens", "Tokens that were generated.", stats.generated_tokens)
        yield _counter("steps", "Decoding steps.", stats.steps)
        bounds = [*map(str, TTFT_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "sympow_time_to_first_token_seconds",
            "Seconds from a request to its first token.",
            # Buckets are cumulative in Prometheus.
            buckets=list(zip(bounds, accumulate(stats.ttft_counts), strict=True)),
            sum_value=stats.ttft_sum,
        )
        yield _counter("prefix_cache_hits", "Prompts that started from the prefix cache.", stats.prefix_hits)
        yield _counter("prefix_cache_misses", "Prompts that found no prefix in the cache.", stats.prefix_misses)
        yield _counter("prefix_cache_hit_tokens", "Tokens that the cache saved prefilling.", stats.prefix_hit_tokens)
        yield _gauge("prefix_cache_entries", "States in the prefix cache.", stats.prefix_entries)
        yield _gauge("prefix_cache_bytes", "Bytes of the prefix cache.", stats.prefix_nbytes)
        yield _gauge("prefix_cache_limit_bytes", "The most bytes of the prefix cache.", stats.prefix_budget)
        yield _gauge("contexts_reading", "Contexts that are being prefilled.", contexts.reading)
        yield _gauge("contexts_in_memory", "Contexts whose states are in memory.", contexts.in_memory)
        yield _gauge("contexts_memory_bytes", "Bytes of these states.", contexts.nbytes)
        yield _gauge("contexts_memory_limit_bytes", "The most bytes of states in memory.", contexts.budget)
        yield _counter("context_hits", "Uses of a context that was in memory.", contexts.hits)
        yield _counter("context_loads", "Uses of a context that was loaded from disk.", contexts.loads)
        yield _counter("contexts_dropped", "Contexts evicted from memory; they stay on disk.", contexts.dropped)
        responses = CounterMetricFamily(
            "sympow_http_responses", "HTTP responses by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(http.responses.items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        yield _gauge("http_requests_open", "HTTP requests that are being answered, this one included.", http.open)
        yield _gauge("tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))
        yield _counter("client_disconnects", "Requests whose clients disconnected before the end.", http.disconnected)


def _gauge(name: str, description: str, value: float) -> Metric:
    return GaugeMetricFamily(f"sympow_{name}", description, value=value)


def _counter(name: str, description: str, value: float) -> Metric:
    return CounterMetricFamily(f"sympow_{name}", description, value=value)
