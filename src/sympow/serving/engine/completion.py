"""`Completion` and `Prefilling`: the caller's handles of a request and of a context, which the worker thread updates.

Threads and coroutines can iterate over a completion, or wait for the whole of it:

    for event in completion: print(event.text, end="")
    async for event in completion: ...
    result = completion.result()           # or: await completion.aresult()
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from sympow.generation.prefix import Prefix

FinishReason = Literal["stop", "length", "cancelled", "error"]


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


class Handover:
    """Lets one thread change something, and any threads and coroutines wait for the change."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def changed(self, change: Callable[[], None]) -> None:
        """Makes a change, and wakes all waiting threads and coroutines."""
        with self._condition:
            change()
            self._condition.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, signal in waiting:
            # An event loop that was closed meanwhile raises RuntimeError; nothing waits in it any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(signal.set)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `ready()`; returns whether it is."""
        with self._condition:
            return self._condition.wait_for(ready, timeout)

    async def await_(self, ready: Callable[[], bool]) -> None:
        """As `wait`, in a coroutine and without a timeout."""
        while True:
            with self._condition:
                if ready():
                    return
                entry = (asyncio.get_running_loop(), asyncio.Event())
                self._waiting.append(entry)
            try:
                await entry[1].wait()
            finally:
                with self._condition:
                    if entry in self._waiting:
                        self._waiting.remove(entry)


class Completion:
    """The handle of a request, returned by `Engine.submit`.

    Iterating yields all events from the first one on, and waits for those to come. A completion can be iterated over
    several times.

    Attributes:
        created: time of submission, by `time.monotonic`.
        first_token_at: time of the first generated token, on the same clock; None until then.
    """

    def __init__(self, prompt_tokens: Sequence[int], on_cancel: Callable[[], None] = lambda: None) -> None:
        self._prompt_tokens = prompt_tokens
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self._events: list[Event] = []
        self._handover = Handover()
        self._on_cancel = on_cancel
        self._cancelled = False

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return tuple(self._prompt_tokens)

    @property
    def done(self) -> bool:
        """Whether the last event has come."""
        return bool(self._events) and self._events[-1].finish_reason is not None

    @property
    def cancel_requested(self) -> bool:
        """Whether `cancel` was called before the end."""
        return self._cancelled

    def cancel(self) -> None:
        """Ends the request: its slot is free at the next step, and the last event says "cancelled".

        Returns at once. Does nothing if the request has ended.
        """
        if not self.done:
            self._cancelled = True
            self._on_cancel()

    def __iter__(self) -> Iterator[Event]:
        place = 0
        while True:
            self._handover.wait(lambda: len(self._events) > place)  # noqa: B023 - waits before place changes
            event = self._events[place]
            place += 1
            yield event
            if event.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        place = 0
        while True:
            await self._handover.await_(lambda: len(self._events) > place)  # noqa: B023
            event = self._events[place]
            place += 1
            yield event
            if event.finish_reason is not None:
                return

    def result(self, timeout: float | None = None) -> Result:
        """The whole completion, once it has ended.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            RequestError: the request failed.
            TimeoutError: the request has not ended in time; it continues.
        """
        if not self._handover.wait(lambda: self.done, timeout):
            raise TimeoutError(f"the completion has not ended within {timeout} seconds")
        return self._result()

    async def aresult(self) -> Result:
        """As `result`, in a coroutine; `asyncio.timeout` limits the time."""
        await self._handover.await_(lambda: self.done)
        return self._result()

    def _result(self) -> Result:
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

    def append(self, event: Event) -> None:
        """Appends an event; called by the engine's worker only."""
        if event.tokens and not event.echo and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._handover.changed(lambda: self._events.append(event))


class Prefilling:
    """The handle of a context in prefill, returned by `Engine.submit_prefill`.

    Attributes:
        tokens: number of tokens of the context, without those of a given prefix.
    """

    def __init__(self, tokens: int, progress: Callable[[int, int], None] | None, on_cancel: Callable[[], None]) -> None:
        self.tokens = tokens
        self._progress, self._on_cancel = progress, on_cancel
        self._handover = Handover()
        self._done_tokens = 0
        self._outcome: Prefix | str | None = None
        self._cancelled = False

    @property
    def done_tokens(self) -> int:
        """How many tokens are prefilled."""
        return self._done_tokens

    @property
    def done(self) -> bool:
        """Whether the prefill has ended, failed or was cancelled."""
        return self._outcome is not None

    @property
    def cancel_requested(self) -> bool:
        """Whether `cancel` was called before the end."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancels the prefill after at most two more segments; `result` then raises `RequestError`. Returns at once."""
        if not self.done:
            self._cancelled = True
            self._on_cancel()

    def result(self, timeout: float | None = None) -> Prefix:
        """The prefix, once the whole context is prefilled.

        Raises:
            RequestError: the prefill failed or was cancelled.
            TimeoutError: the prefill has not ended in time; it continues.
        """
        if not self._handover.wait(lambda: self.done, timeout):
            raise TimeoutError(f"the context was not prefilled within {timeout} seconds")
        return self._result()

    async def aresult(self) -> Prefix:
        """As `result`, in a coroutine."""
        await self._handover.await_(lambda: self.done)
        return self._result()

    def _result(self) -> Prefix:
        if not isinstance(self._outcome, Prefix):
            raise RequestError(self._outcome)
        return self._outcome

    def advance(self, tokens: int) -> None:
        """Reports how many tokens are prefilled; called by the engine's worker only, as is `end`."""
        self._done_tokens = tokens
        if self._progress is not None:
            self._progress(tokens, self.tokens)

    def end(self, outcome: Prefix | str) -> None:
        """Ends the prefill with the prefix, or with an error message."""

        def change() -> None:
            self._outcome = outcome

        self._handover.changed(change)
