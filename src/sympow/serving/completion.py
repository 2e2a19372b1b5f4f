"""`Completion` and `Prefilling`: the caller's end of a request, to which a worker thread hands what becomes known.

A completion is iterated over, or waited for as a whole, by threads and by coroutines alike:

    for event in completion: print(event.text, end="")
    async for event in completion: ...
    result = completion.result()           # or: await completion.aresult()
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
        token: its id.
        logprob: None for the first token of a text, which nothing predicts.
        top: the most likely tokens at this place with their log-probabilities, the most likely first; as many as the
            request asked for.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """How many tokens a request took.

    Attributes:
        prompt_tokens: tokens of the prompt, those of a given prefix not included.
        completion_tokens: generated tokens, a boundary token at the end included.
        cached_tokens: tokens of the prompt whose state the prefix cache had.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """What became known at one moment: some text, some tokens, or the end.

    Attributes:
        text: whole characters; "" while a character is incomplete or text might become a stop string.
        tokens: ids of new tokens.
        logprobs: one entry for each of `tokens`, if the request asked for them.
        echo: whether text and tokens are the prompt's, which come first if the request asked for them.
        finish_reason: None but for the last event: "stop" (the boundary token or a stop string), "length" (max_tokens),
            "cancelled", or "error".
        error: the reason of an "error".
        usage: with the last event.
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
        text: of the completion, after the prompt's if that was to be echoed.
        tokens: generated ids; a boundary token that ended the text is the last of them.
        logprobs: one entry for each of `tokens`; None if not asked for.
        prompt_logprobs: one entry for each token of the prompt, if both echo and logprobs were asked for.
        finish_reason: as in `Event`; never "error", which raises `RequestError`.
        usage: tokens of prompt and completion.
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
    """A growing list of events that one thread appends to, and any threads and coroutines wait for."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def changed(self, change: Callable[[], None]) -> None:
        """Makes a change and wakes everyone who waits."""
        with self._condition:
            change()
            self._condition.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, signal in waiting:
            # A loop that was closed since raises RuntimeError: nobody waits there.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(signal.set)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `ready()`; returns whether it is."""
        with self._condition:
            return self._condition.wait_for(ready, timeout)

    async def await_(self, ready: Callable[[], bool]) -> None:
        """The same in a coroutine."""
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
    """A request on its way. Made by `Engine.submit`.

    Iterating yields every event from the first, waiting for those to come; a completion can be iterated over again.

    Attributes:
        prompt_tokens: the prompt's tokens.
        created: when it was submitted, in seconds of `time.monotonic`.
        first_token_at: when the first token was generated, on the same clock; None until then.
    """

    def __init__(self, prompt_tokens: tuple[int, ...], on_cancel: Callable[[], None] = lambda: None) -> None:
        self.prompt_tokens = prompt_tokens
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self._events: list[Event] = []
        self._handover = Handover()
        self._on_cancel = on_cancel
        self._cancelled = False

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
            TimeoutError: it has not ended in time; it goes on.
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
        """Hands an event to those who wait; the engine's worker alone calls this."""
        if event.tokens and not event.echo and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._handover.changed(lambda: self._events.append(event))


class Prefilling:
    """A context on its way. Made by `Engine.submit_prefill`.

    Attributes:
        tokens: how many tokens it has in all, those of the prefix before it not included.
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
        """How many of them are prefilled."""
        return self._done_tokens

    @property
    def done(self) -> bool:
        """Whether it has ended, in one way or another."""
        return self._outcome is not None

    @property
    def cancel_requested(self) -> bool:
        """Whether `cancel` was called before the end."""
        return self._cancelled

    def cancel(self) -> None:
        """Ends it after the segments at hand, two at most; `result` then raises `RequestError`. Returns at once."""
        if not self.done:
            self._cancelled = True
            self._on_cancel()

    def result(self, timeout: float | None = None) -> Prefix:
        """The prefix, once all is prefilled.

        Raises:
            RequestError: it failed or was cancelled.
            TimeoutError: it has not ended in time; it goes on.
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
        """Reports tokens as prefilled; the engine's worker alone calls this and `end`."""
        self._done_tokens = tokens
        if self._progress is not None:
            self._progress(tokens, self.tokens)

    def end(self, outcome: Prefix | str) -> None:
        """Hands over the prefix, or the reason why there is none."""

        def change() -> None:
            self._outcome = outcome

        self._handover.changed(change)
