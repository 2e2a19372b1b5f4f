"""`Completion` and `Prefilling`: what the caller of the engine holds of a request and of a context.

The worker thread updates them. Threads and coroutines can iterate over a completion, or wait for the whole of it:

    for event in completion: print(event.text, end="")
    async for event in completion: ...
    result = completion.result()           # or: await completion.aresult()
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Generic, Literal, TypeVar

from sympow.generation.prefix import Prefix

FinishReason = Literal["stop", "length", "cancelled", "error"]

Outcome = TypeVar("Outcome")


class RequestError(RuntimeError):
    """A request failed; the message says why. Other requests are not affected."""


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token under the model, before temperature, penalty and truncation.

    Attributes:
        token: id of the token.
        logprob: its log-probability; None for the first token of a text, which nothing predicts.
        top: the most likely tokens at this position with their log-probabilities, the most likely first; as many as the
            request asked for.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: tokens of the prompt, without those of a given prefix.
        completion_tokens: generated tokens, including a boundary token at the end.
        cached_tokens: tokens of the prompt that came from the prefix cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """One update of a completion: new text and tokens, or the end.

    Attributes:
        text: new text in whole characters; "" while a character is incomplete or the text may become a stop string.
        tokens: ids of new tokens.
        logprobs: one entry for each of `tokens`, if the request asked for them.
        echo: whether text and tokens are those of the prompt, the first event of requests with `echo`.
        finish_reason: of the last event: "stop" (the boundary token or a stop string), "length" (max_tokens),
            "cancelled" or "error"; None for all other events.
        error: the message, if the reason is "error".
        usage: token counts, in the last event.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    echo: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Result:
    """A whole completion.

    Attributes:
        text: generated text, preceded by the prompt if `echo` was set.
        tokens: generated ids; a boundary token that ended the text is the last of them.
        logprobs: one entry for each of `tokens`; None if not asked for.
        prompt_logprobs: one entry for each token of the prompt, if both echo and logprobs were asked for; else None.
        finish_reason: as in `Event`, but never "error": `result` raises `RequestError` instead.
        usage: token counts.
        time_to_first_token: seconds from `submit` to the first generated token; None if there was none.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    usage: Usage
    time_to_first_token: float | None


class Signal(Future[None]):
    """Something that happens once, for which threads and coroutines can wait; who stops waiting cancels nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()


class Handle(ABC, Generic[Outcome]):
    """Lets any threads and coroutines wait for work of the worker thread, and cancel it.

    Args:
        on_cancel: called when the work is cancelled.

    Attributes:
        cancel_requested: whether `cancel` was called before the end.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self.cancel_requested = False
        self._ended = Signal()

    @property
    def done(self) -> bool:
        """Whether the work has ended, failed or was cancelled."""
        return self._ended.done()

    def cancel(self) -> None:
        """Ends the work early. Returns at once, and does nothing if it has ended."""
        if not self.done:
            self.cancel_requested = True
            self._on_cancel()

    def result(self, timeout: float | None = None) -> Outcome:
        """What came of the work, once it has ended.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            RequestError: it failed.
            TimeoutError: it has not ended in time; it continues.
        """
        try:
            self._ended.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"{self._late} within {timeout} seconds") from None
        return self._outcome()

    async def aresult(self) -> Outcome:
        """As `result`, in a coroutine; `asyncio.timeout` limits the time."""
        await asyncio.wrap_future(self._ended)
        return self._outcome()

    # Begins the message of a TimeoutError.
    _late: str

    @abstractmethod
    def _outcome(self) -> Outcome:
        """What came of work that has ended."""


class Completion(Handle[Result]):
    """The handle of a request, returned by `Engine.submit`.

    Iterating yields all events from the first one on, and waits for those to come. A completion can be iterated over
    several times. Once it is cancelled, its slot is free at the next step, and the last event says "cancelled".

    Attributes:
        created: time of submission, by `time.monotonic`.
        first_token_at: time of the first generated token, on the same clock; None until then.
    """

    _late = "the completion has not ended"

    def __init__(self, prompt_tokens: Sequence[int], on_cancel: Callable[[], None] = lambda: None) -> None:
        super().__init__(on_cancel)
        self._prompt_tokens = prompt_tokens
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self._events: list[Event] = []
        self._next = Signal()

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return tuple(self._prompt_tokens)

    def __iter__(self) -> Iterator[Event]:
        for place in count():
            if (coming := self._awaited(place)) is not None:
                coming.result()
            yield (event := self._events[place])
            if event.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        for place in count():
            if (coming := self._awaited(place)) is not None:
                await asyncio.wrap_future(coming)
            yield (event := self._events[place])
            if event.finish_reason is not None:
                return

    def _awaited(self, place: int) -> Signal | None:
        """What to wait for before an event is there; None: it is."""
        # Read before the events, or the signal of this one might be over and that of the next be awaited.
        coming = self._next
        return coming if len(self._events) == place else None

    def append(self, event: Event) -> None:
        """Appends an event; called by the engine's worker only."""
        if event.tokens and not event.echo and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._events.append(event)
        if event.finish_reason is not None:
            self._ended.set_result(None)
        come, self._next = self._next, Signal()
        come.set_result(None)

    def _outcome(self) -> Result:
        last = self._events[-1]
        assert last.finish_reason is not None
        if last.finish_reason == "error":
            raise RequestError(last.error)

        def joined(echo: bool) -> tuple[TokenLogprob, ...] | None:
            known = [e.logprobs for e in self._events if e.echo == echo and e.logprobs is not None]
            return tuple(entry for entries in known for entry in entries) if known else None

        return Result(
            text="".join(event.text for event in self._events),
            tokens=tuple(token for event in self._events if not event.echo for token in event.tokens),
            logprobs=joined(echo=False),
            prompt_logprobs=joined(echo=True),
            finish_reason=last.finish_reason,
            usage=last.usage or Usage(),
            time_to_first_token=None if self.first_token_at is None else self.first_token_at - self.created,
        )


class Prefilling(Handle[Prefix]):
    """The handle of a context in prefill, returned by `Engine.submit_prefill`.

    Once it is cancelled, at most two more segments are prefilled, and `result` raises `RequestError`.

    Attributes:
        tokens: number of tokens of the context, without those of a given prefix.
        done_tokens: how many of them are prefilled.
    """

    _late = "the context was not prefilled"

    def __init__(self, tokens: int, progress: Callable[[int, int], None] | None, on_cancel: Callable[[], None]) -> None:
        super().__init__(on_cancel)
        self.tokens, self.done_tokens = tokens, 0
        self._progress = progress
        self._ended_with: Prefix | str | None = None

    def advance(self, tokens: int) -> None:
        """Reports how many tokens are prefilled; called by the engine's worker only, as is `end`."""
        self.done_tokens = tokens
        if self._progress is not None:
            self._progress(tokens, self.tokens)

    def end(self, outcome: Prefix | str) -> None:
        """Ends the prefill with the prefix, or with an error message."""
        self._ended_with = outcome
        self._ended.set_result(None)

    def _outcome(self) -> Prefix:
        if not isinstance(self._ended_with, Prefix):
            raise RequestError(self._ended_with)
        return self._ended_with
