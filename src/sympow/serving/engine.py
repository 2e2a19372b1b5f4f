"""`Engine`: continuous batching. Requests of any lengths and settings share the steps of one batch of fixed size.

    engine = Engine(TextModel.load("runs/first/model", "cuda"), slots=64)
    completion = engine.submit("def fib(", Sampling(temperature=0), max_tokens=100)    # returns at once
    for event in completion:                                                           # or: async for
        print(event.text, end="")
    print(completion.result().usage)
    engine.close()

A worker thread owns the model. Between two steps requests join free slots and leave theirs, and at most `segment_size`
tokens of waiting prompts are prefilled, in turn, so that a long prompt delays nobody's next token by more than that.
With symmetric powers a slot is a state of fixed size, whatever it has read (`sympow.Window` with `put` and `take`).

A request gives what it gives alone. Its samples come from its own generator, the one that `sympow.generation.generate`
would use. Matrix products always have the same number of rows (`step_rows`), so that rounding does not depend on who
shares the batch either; only a state that the prefix cache took at the end of another prompt is rounded differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel
from sympow.ops.window import CAPACITY
from sympow.serving.completion import Completion

# The most log-probabilities of a token that a request can ask for.
MAX_LOGPROBS = 20
# Upper bounds, in seconds, of the histogram of times to the first token; the last one has no bound.
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class QueueFullError(RuntimeError):
    """The engine's queue is full: try again later."""


class EngineClosedError(RuntimeError):
    """The engine is closed, or its worker has failed; the message says which."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and what is so now.

    Attributes:
        slots: the number of slots.
        running: requests in a slot.
        prefilling: requests whose prompts are being prefilled, those of `prefill` included.
        queued: requests that wait for a slot.
        max_queue: the most that may wait.
        slot_nbytes: bytes of one slot.
        submitted, rejected: requests accepted and refused (the queue was full).
        finished: ended requests by finish reason.
        prompt_tokens: tokens that were prefilled, those from the prefix cache not included.
        generated_tokens: tokens that were generated.
        steps: decoding steps.
        ttft_counts: how many first tokens took at most each of `TTFT_BUCKETS`, but more than the one before; the last
            entry counts those beyond.
        ttft_sum: seconds to the first token, of all requests together.
        prefix_hits, prefix_misses: prompts that did or did not start from the prefix cache.
        prefix_hit_tokens: tokens of prompts whose prefilling it saved.
        prefix_entries, prefix_nbytes, prefix_budget: what the prefix cache holds, and may hold, in bytes.
    """

    slots: int
    running: int
    prefilling: int
    queued: int
    max_queue: int
    slot_nbytes: int
    submitted: int = 0
    rejected: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    ttft_counts: tuple[int, ...] = (0,) * (len(TTFT_BUCKETS) + 1)
    ttft_sum: float = 0.0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_hit_tokens: int = 0
    prefix_entries: int = 0
    prefix_nbytes: int = 0
    prefix_budget: int = 0


class Prefilling:
    """A context on its way. Made by `Engine.submit_prefill`.

    Attributes:
        tokens: how many tokens it has in all, those of the prefix before it not included.
    """

    tokens: int

    @property
    def done_tokens(self) -> int:
        """How many of them are prefilled."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether it has ended, in one way or another."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ends it after the segment at hand; `result` then raises `RequestError`. Returns at once."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Prefix:
        """The prefix, once all is prefilled.

        Raises:
            RequestError: it failed or was cancelled.
            TimeoutError: it has not ended in time; it goes on.
        """
        raise NotImplementedError

    async def aresult(self) -> Prefix:
        """As `result`, in a coroutine."""
        raise NotImplementedError


class Engine:
    """Decodes many requests as one batch. All methods may be called from any thread.

    Args:
        text_model: a model and its tokenizer, on the device where both stay. Nothing else may change the model.
        slots: how many requests are decoded at once; memory is allocated for all of them.
        segment_size: tokens of prompts that are prefilled between two steps; None: 2,048 on a GPU, 256 on a CPU.
        window: tokens of each slot between two folds into its state.
        max_context: the most tokens of a slot, prompt and completion together. Softmax models need it, for which it
            determines the bytes of a slot; symmetric powers take any length, and no limit is the default.
        max_queue: how many requests may wait for a slot.
        prefix_cache_bytes: for the states of prompts, from which later prompts that begin alike start; 0: none.
        step_rows: rows of every matrix product of a step, by which rounding is the same however many requests run.
            None: all slots on a GPU, where weights are read once for all rows; at most 16 on a CPU.
        graphs: whether to capture steps as CUDA graphs, on a GPU.
    """

    def __init__(
        self,
        text_model: TextModel,
        slots: int = 64,
        *,
        segment_size: int | None = None,
        window: int = CAPACITY,
        max_context: int | None = None,
        max_queue: int = 256,
        prefix_cache_bytes: int = 2**30,
        step_rows: int | None = None,
        graphs: bool = True,
    ) -> None:
        raise NotImplementedError

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        prefix: Prefix | None = None,
        ignore_boundary: bool = False,
    ) -> Completion:
        """Queues a request and returns at once.

        Args:
            prompt: a text, before which the boundary token of a document comes unless it continues a prefix; or token
                ids, taken as they are. It can only be empty with a prefix or as a text.
            sampling: None: from the model's distribution, unchanged.
            max_tokens: the most tokens to generate; 0: only prefill, as for the log-probabilities of a prompt.
            stop: strings that end the text and are not part of it.
            seed: of the samples; None: a new one each time.
            logprobs: how many of the most likely tokens to report with each token's own log-probability, 0 to 20;
                None: no log-probabilities.
            echo: whether the prompt comes first, as an event of its own; with its log-probabilities if asked for.
            prefix: the text before the prompt, of one sequence, by the same model; it is not modified.
            ignore_boundary: whether to go on after a boundary token, up to max_tokens.

        Raises:
            QueueFullError: `max_queue` requests wait already.
            EngineClosedError: the engine is closed.
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        raise NotImplementedError

    def prefill(
        self,
        text: str | Sequence[int],
        *,
        prefix: Prefix | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefix:
        """As `submit_prefill`, and waits for the prefix."""
        return self.submit_prefill(text, prefix=prefix, progress=progress).result()

    def submit_prefill(
        self,
        text: str | Sequence[int],
        *,
        prefix: Prefix | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefilling:
        """Prefills a context in segments between the steps of running requests, and returns at once.

        It takes no slot, and does not count for `max_queue`; contexts and prompts take turns.

        Args:
            text, prefix: as `prompt` and `prefix` of `submit`.
            progress: called by the worker after each segment with the tokens prefilled and those in all; it must
                return quickly and not raise.
        """
        raise NotImplementedError

    def warm_up(self) -> None:
        """Runs steps of every batch size, so that no later one has to compile kernels or capture a CUDA graph."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Counters and gauges, for monitoring."""
        raise NotImplementedError

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Ends the worker. Later calls of `submit` raise `EngineClosedError`.

        Args:
            drain: whether requests that were submitted end as they would; otherwise they are cancelled.
            timeout: seconds after which requests that are left are cancelled; None: no limit.
        """
        raise NotImplementedError

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)
