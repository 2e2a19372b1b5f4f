"""`EngineStats`: what an engine counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Upper bounds, in seconds, of the histogram of the time to first token; one more bucket counts those beyond.
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(kw_only=True)
class EngineStats:
    """Gauges of the engine's present state, and counters since its start.

    Attributes:
        slots: the number of slots.
        max_queue: the most requests that may wait.
        slot_nbytes: bytes of one slot.
        prefix_budget: the most bytes of the prefix cache.
        running: requests that are being decoded.
        prefilling: requests with a slot whose prompts are being prefilled, and contexts that are being prefilled.
        queued: requests that wait for a slot.
        prefix_hits, prefix_misses: prompts that did or did not start from the prefix cache.
        prefix_hit_tokens: prompt tokens that needed no prefill because of the prefix cache.
        prefix_entries, prefix_nbytes: states in the prefix cache, and their bytes.
        submitted, rejected: requests accepted, and refused because the queue was full.
        finished: ended requests by finish reason.
        prompt_tokens: tokens that were prefilled, without those from the prefix cache.
        generated_tokens: tokens that were generated.
        steps: decoding steps.
        ttft_counts: histogram of the time to first token: entry i counts requests above bound i − 1 and up to bound i
            of `TTFT_BUCKETS`; the last entry counts requests above all bounds.
        ttft_sum: sum of the time to first token over all requests, in seconds.
    """

    slots: int
    max_queue: int
    slot_nbytes: int
    prefix_budget: int
    running: int = 0
    prefilling: int = 0
    queued: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_hit_tokens: int = 0
    prefix_entries: int = 0
    prefix_nbytes: int = 0
    submitted: int = 0
    rejected: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS) + 1))
    ttft_sum: float = 0.0
