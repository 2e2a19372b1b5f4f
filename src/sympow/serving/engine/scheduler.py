"""The engine's worker: a thread that owns the model, and decides what runs next.

In each round the worker drops cancelled requests, gives free slots to waiting requests, prefills at most one segment's
tokens, in turns among the prompts and contexts, and decodes one token for every running request.

The device is at most one round behind: it computes the segments of one round while the host launches those of the next.
Launching a CUDA graph takes the host far less time than running it takes the device. Without a bound, all segments of a
long context would be queued on the device's stream at once: a new request would wait for all of them, none could be
cancelled, and progress would be unknown.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from traceback import clear_frames

import torch

from sympow.generation.sampling import Sampling
from sympow.model.gpt import GPT
from sympow.serving.engine.completion import Event, FinishReason, TokenLogprob
from sympow.serving.engine.prefill_graphs import PrefillGraphs
from sympow.serving.engine.prefix_cache import PrefixCache
from sympow.serving.engine.request import ContextPrefill, Prefill, Request
from sympow.serving.engine.row_sampling import RowSampler
from sympow.serving.engine.slots import Slots
from sympow.serving.engine.stats import TTFT_BUCKETS, EngineStats

# Texts of several segments that are prefilled in turns. Each holds a state beside those of the slots.
TEXTS_IN_TURN = 4


def mark_now(device: torch.device) -> torch.cuda.Event | None:
    """A mark after everything launched so far on the current stream of a device; None: it is computed already."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class QueueFullError(RuntimeError):
    """The engine's queue is full: try again later."""


class EngineClosedError(RuntimeError):
    """The engine is closed, or its worker has failed; the message says which."""


class Scheduler:
    """The worker thread, and what it shares with callers under a lock: the queue and the number of requests.

    Args:
        model: the model.
        slots, sampler, cache, prefill_graphs: used by the worker alone. If `prefill_graphs` is None, prompts are
            prefilled eagerly.
        rows: the number of slots.
        segment_size: tokens to prefill between two steps.
        max_queue: the most requests beyond those in slots.

    Attributes:
        failure: what ended the worker; None if it runs or was closed.
    """

    def __init__(
        self,
        model: GPT,
        slots: Slots,
        sampler: RowSampler,
        cache: PrefixCache,
        prefill_graphs: PrefillGraphs | None,
        *,
        rows: int,
        segment_size: int,
        max_queue: int,
    ) -> None:
        self._model, self._slots, self._sampler, self._cache = model, slots, sampler, cache
        self._prefill_graphs = prefill_graphs
        self._segment_size, self._limit = segment_size, rows + max_queue
        self._device = model.embedding.weight.device
        # Segments that the device may not have computed yet: a mark behind each, its text, and the position after it.
        self._launched: deque[tuple[torch.cuda.Event | None, Request | ContextPrefill, int]] = deque()
        self._launched_in_round = 0
        self._changed = threading.Condition()
        # What has been submitted, but for requests that have a slot and contexts that the worker has seen.
        self._queue: deque[Request | ContextPrefill] = deque()
        self._tasks: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._cancelled = self._closing = self._aborting = False
        self.failure: BaseException | None = None
        self._in_flight = 0
        self._turns: deque[Request | ContextPrefill] = deque()
        # Texts of several segments that wait to begin while `TEXTS_IN_TURN` others are in prefill.
        self._put_off: deque[Request | ContextPrefill] = deque()
        self._rows: list[Request | None] = [None] * rows
        self._stats = EngineStats(
            slots=rows, max_queue=max_queue, slot_nbytes=slots.nbytes // rows, prefix_budget=cache.budget
        )
        self._thread = threading.Thread(target=self._run, name="sympow-engine", daemon=True)
        self._thread.start()

    # What callers use -------------------------------------------------------------------------------------------------

    def submit(self, work: Request | ContextPrefill) -> None:
        with self._changed:
            self.check_open()
            if isinstance(work, Request):
                if self._in_flight >= self._limit:
                    self._stats.rejected += 1
                    raise QueueFullError(
                        f"{self._in_flight} requests run or wait already, as many as this engine takes"
                    )
                self._stats.submitted += 1
                self._in_flight += 1
            self._queue.append(work)
            self._changed.notify()

    def wake(self) -> None:
        """Makes the worker look for cancelled requests."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()

    def run_between_steps(self, task: Callable[[], None]) -> None:
        """Runs a task in the worker between two steps, and waits for it."""
        future: Future[None] = Future()
        with self._changed:
            self.check_open()
            self._tasks.append((task, future))
            self._changed.notify()
        future.result()

    def close(self, *, drain: bool, timeout: float | None) -> None:
        with self._changed:
            self._closing = True
            self._aborting = self._aborting or not drain
            self._changed.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._aborting = True
                self._changed.notify()
            self._thread.join()

    def stats(self) -> EngineStats:
        with self._changed:
            queued = sum(isinstance(work, Request) for work in self._queue)
        cache = self._cache
        return replace(
            deepcopy(self._stats),
            running=self._running,
            prefilling=len(self._turns) + len(self._put_off),
            queued=queued,
            prefix_hits=cache.hits,
            prefix_misses=cache.misses,
            prefix_hit_tokens=cache.hit_tokens,
            prefix_entries=len(cache),
            prefix_nbytes=cache.nbytes,
        )

    @property
    def _running(self) -> int:
        return sum(request is not None for request in self._rows)

    @property
    def alive(self) -> bool:
        return not self._closing and self.failure is None

    def check_open(self) -> None:
        if self.failure is not None:
            raise EngineClosedError(f"the engine's worker has failed: {self.failure!r}")
        if self._closing:
            raise EngineClosedError("the engine is closed")

    # The worker -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        try:
            with on_device, torch.no_grad():
                while self._wait_for_work():
                    self._run_tasks()
                    self._drop_cancelled()
                    self._admit()
                    self._prefill()
                    self._decode()
        except Exception as error:  # noqa: BLE001 - every caller who waits is told
            self.failure = error
            _clear_frames(error)
        finally:
            self._end_all()

    def _wait_for_work(self) -> bool:
        """Waits for work; returns False if the worker is to end."""
        with self._changed:
            while True:
                busy = self._queue or self._turns or self._put_off or any(self._rows)
                if self._aborting or (self._closing and not busy):
                    return False
                if busy or self._tasks:
                    return True
                self._changed.wait()

    def _run_tasks(self) -> None:
        while self._tasks:
            task, future = self._tasks.popleft()
            try:
                future.set_result(task())
            except Exception as error:  # noqa: BLE001 - raised where the caller waits
                future.set_exception(error)

    def _drop_cancelled(self) -> None:
        dropped: list[Request | ContextPrefill] = []
        with self._changed:
            if not self._cancelled:
                return
            self._cancelled = False
            for waiting in (self._queue, self._turns, self._put_off):
                cancelled = [work for work in waiting if work.handle.cancel_requested]
                for work in cancelled:
                    waiting.remove(work)
                dropped += cancelled
        for row, request in enumerate(self._rows):
            if request is not None and request.handle.cancel_requested:
                self._release(row)
                dropped.append(request)
        for work in dropped:
            self._end(work, Event(finish_reason="cancelled"))

    def _admit(self) -> None:
        """Gives free slots to requests in order of arrival, and starts contexts, which need no slot."""
        with self._changed:
            prefilling = sum(isinstance(work, Request) for work in (*self._turns, *self._put_off))
            free = len(self._rows) - self._running - prefilling
            waiting: deque[Request | ContextPrefill] = deque()
            for work in self._queue:
                if isinstance(work, ContextPrefill):
                    self._turns.append(work)
                elif free:
                    self._turns.append(work)
                    free -= 1
                else:
                    waiting.append(work)
            self._queue = waiting

    def _prefill(self) -> None:
        """Prefills segments of prompts and contexts in turns, at most `segment_size` tokens in all.

        With graphs, padding counts as tokens.

        A text whose next segment is its last always takes its turn. Of longer texts, which hold a state from turn to
        turn, only `TEXTS_IN_TURN` are in prefill; the others wait in order of arrival.
        """
        # What was launched before the previous round is computed from here on.
        self._await_launched(self._launched_in_round)
        self._launched_in_round = 0
        left = self._segment_size
        while self._turns or self._put_off:
            begun = sum(work.begun for work in self._turns)
            if self._put_off and begun < TEXTS_IN_TURN:
                self._turns.appendleft(self._put_off.popleft())
            work = self._turns[0]
            work.look_up(self._cache)
            if not (work.begun or work.in_one_segment):
                if begun >= TEXTS_IN_TURN:
                    work.put_off()
                    self._put_off.append(self._turns.popleft())
                    continue
                work.begun = True
            length = work.next_length
            computed = length
            if length and self._prefill_graphs is not None:
                computed = self._prefill_graphs.padded(length)
            if computed > left:
                return
            left -= computed
            try:
                if length:
                    work.advance(self._model, self._cache, self._prefill_graphs)
                    self._stats.prompt_tokens += length
                self._launched.append((mark_now(self._device), work, work.position))
                self._launched_in_round += 1
                self._await_launched(len(self._launched))
                if work not in self._turns:
                    # Reporting its progress raised, which ended the context.
                    continue
                if not work.finished:
                    self._turns.rotate(-1)
                    continue
                self._turns.popleft()
                if isinstance(work, Request):
                    self._join(work)
                else:
                    self._await_launched()
                    if not work.handle.done:
                        self._end(work, Event(finish_reason="stop"))
            except Exception as error:  # noqa: BLE001 - of this text alone; its caller is told
                self._fail(work, error)

    def _await_launched(self, most: int = 0) -> None:
        """Waits until the device has computed all launched segments but `most`, and reports progress of contexts."""
        while self._launched:
            mark, work, position = self._launched[0]
            if mark is not None and not mark.query():
                if len(self._launched) <= most:
                    return
                mark.synchronize()
            self._launched.popleft()
            if isinstance(work, ContextPrefill) and not work.handle.done:
                try:
                    work.handle.advance(position)
                except Exception as error:  # noqa: BLE001 - of this context alone; its caller is told
                    self._fail(work, error)

    def _fail(self, work: Request | ContextPrefill, error: Exception) -> None:
        """Ends a prompt or context in prefill with an error."""
        if work in self._turns:
            self._turns.remove(work)
        self._end(work, _failed(error))

    def _join(self, request: Request) -> None:
        """Puts a request whose prompt is prefilled into a free slot."""
        if request.echo is not None:
            logprobs = None if request.logprobs is None else tuple(request.scores)
            request.handle.append(Event(request.echo, tuple(request.tokens), logprobs, echo=True))
        if request.max_tokens == 0:
            self._await_launched()
            self._end(request, Event(finish_reason="length"))
            return
        assert request.prefix is not None
        row = self._rows.index(None)
        self._slots.put(row, request.prefix)
        self._sampler.put(row, request.sampling, request.seed, logprobs=request.logprobs is not None)
        self._rows[row] = request
        # The slot holds a copy of the state.
        request.prefix = None

    def _decode(self) -> None:
        """Chooses the next token of every running request, and runs a decoding step.

        On a GPU the step runs while the host handles the tokens; on a CPU it follows, without requests that have ended.
        """
        rows = self._compact()
        if not rows:
            return
        transfer = self._sampler.choose(rows, self._slots.batch_rows(rows))
        overlapped = self._device.type == "cuda"
        if overlapped and any(r is not None and r.generated + 1 < r.max_tokens for r in self._rows):
            self._slots.step(rows)
        choices = transfer.wait()
        self._stats.steps += 1
        for row, request in enumerate(self._rows[:rows]):
            if request is not None:
                self._deliver(row, request, choices[row])
        if not overlapped:
            rows = self._compact()
            if rows:
                self._slots.step(rows)

    def _compact(self) -> int:
        """Moves requests from the last rows into free ones if that makes the batch smaller; returns the rows in use."""
        running = self._running
        last = max((row + 1 for row, request in enumerate(self._rows) if request is not None), default=0)
        while running and self._slots.batch_rows(running) < self._slots.batch_rows(last):
            gap = self._rows.index(None)
            self._slots.move(last - 1, gap)
            self._sampler.move(last - 1, gap)
            self._rows[gap], self._rows[last - 1] = self._rows[last - 1], None
            last = max(row + 1 for row, request in enumerate(self._rows) if request is not None)
        return last

    def _deliver(self, row: int, request: Request, choice: TokenLogprob | None) -> None:
        self._stats.generated_tokens += choice is not None
        try:
            event = request.take(choice)
        except Exception as error:  # noqa: BLE001 - a tokenizer's, on this text alone; its caller is told
            event = _failed(error)
        if event.finish_reason is None:
            request.handle.append(event)
        else:
            self._release(row)
            self._end(request, event)
        if request.generated == 1 and event.tokens:
            assert request.handle.first_token_at is not None
            seconds = request.handle.first_token_at - request.handle.created
            self._stats.ttft_sum += seconds
            self._stats.ttft_counts[bisect_left(TTFT_BUCKETS, seconds)] += 1

    def warm_up(self) -> None:
        """Does the work of `Engine.warm_up`; called in the worker, while no request runs."""
        if self._running:
            raise RuntimeError("warm_up must be called before requests run")
        on_gpu = self._device.type == "cuda"
        if self._prefill_graphs is not None:
            self._prefill_graphs.record()
        # A whole segment, and a short one that continues its state.
        text = Prefill((0,) * (self._segment_size + 1), self._segment_size)
        while not text.finished:
            text.advance(self._model, PrefixCache(0), self._prefill_graphs)
        if self._prefill_graphs is not None:
            # Copying a state into a slot is a graph, too. Softmax models have no prefill graphs and skip this: their
            # slots may be too small for a whole segment.
            assert text.prefix is not None
            for _ in range(3):
                self._slots.put(0, text.prefix)
        kinds = [
            (replace(sampling, repetition_penalty=penalty), logprobs)
            for sampling in (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9))
            for penalty in (1.0, 1.1)
            for logprobs in (False, True)
        ]
        sizes = {self._slots.batch_rows(rows) for rows in range(1, len(self._rows) + 1)}
        for rows in sorted(sizes) if on_gpu else (1,):
            # The first call runs eagerly, the second is captured, the third replayed.
            for _ in range(3 if on_gpu else 1):
                for sampling, logprobs in kinds:
                    self._sampler.put(0, sampling, None, logprobs=logprobs)
                    self._sampler.choose(rows, rows).wait()
                self._slots.step(rows)
                self._slots.fold_full(rows)
        self._sampler.clear(0)

    def _release(self, row: int) -> None:
        self._rows[row] = None
        self._sampler.clear(row)

    def _end(self, work: Request | ContextPrefill, last: Event) -> None:
        """Ends a request or a context, and tells its caller.

        Args:
            last: the last event of a request; a context ends with its prefix if the reason is "stop".
        """
        prefix, work.prefix = work.prefix, None
        assert last.finish_reason is not None
        if isinstance(work, ContextPrefill):
            ended = prefix if last.finish_reason == "stop" else last.error or "the context was cancelled"
            assert ended is not None
            work.handle.end(ended)
            return
        with self._changed:
            self._in_flight -= 1
        self._stats.finished[last.finish_reason] += 1
        work.end(last)

    def _end_all(self) -> None:
        """Ends everything that is left, and frees the memory of the slots and of the prefix cache."""
        with self._changed:
            self._closing = True
            left = [*self._queue, *self._turns, *self._put_off, *filter(None, self._rows)]
            for emptied in (self._queue, self._turns, self._put_off):
                emptied.clear()
            self._launched.clear()
            self._rows = [None] * len(self._rows)
            tasks = list(self._tasks)
            self._tasks.clear()
        reason: FinishReason = "cancelled" if self.failure is None else "error"
        message = None if self.failure is None else f"the engine's worker has failed: {self.failure!r}"
        for work in left:
            self._end(work, Event(finish_reason=reason, error=message))
        for _, future in tasks:
            future.set_exception(EngineClosedError(message or "the engine is closed"))
        for owner in (self._slots, self._sampler, self._prefill_graphs):
            if owner is not None:
                owner.calls.clear()
        del self._slots, self._sampler, self._prefill_graphs
        self._cache.clear()


def _failed(error: Exception) -> Event:
    return Event(finish_reason="error", error=f"{type(error).__name__}: {error}")


def _clear_frames(error: BaseException) -> None:
    """Clears local variables, such as tensors, that an error's tracebacks keep; line numbers stay."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    # An error may be its own cause.
    while following is not None and following not in chain:
        clear_frames(following.__traceback__)
        chain.append(following)
        following = following.__cause__ or following.__context__
