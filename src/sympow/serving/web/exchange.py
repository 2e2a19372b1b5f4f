"""`Exchange`: one HTTP request for completions, until its response has ended.

`Exchange.fail` is the only way to end one early: when the client disconnects, when the request times out, or when the
server stops. Its slots are then free at the engine's next step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sympow.serving.engine.completion import Completion, Event, Result, Usage
from sympow.serving.web.answers import Answer
from sympow.serving.web.errors import DISCONNECTED, NO_RETRY, ApiError, disconnected, failed
from sympow.serving.web.gatekeeping import HttpCounts

# Events of several completions that are queued for a slow client; further ones stay with their completions.
WAITING_CHUNKS = 64
# Seconds that a client gets to read the error at the end of its stream.
LAST_WORDS = 5.0

T = TypeVar("T")


class Exchange:
    """The completions of one HTTP request. At the end of the `with` block, those that have not ended are cancelled.

    Args:
        receive: of the HTTP request, by which its client disconnects.
        timeout: seconds that the exchange may take.
        running: the running exchanges of the server; this one is in it until it ends.
        counts: counts clients that disconnect.
    """

    def __init__(self, receive: Receive, timeout: float, running: set[Exchange], counts: HttpCounts) -> None:
        self.completions: list[Completion] = []
        self.error: ApiError | None = None
        self._receive, self._counts, self._running = receive, counts, running
        self._failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        message = f"the request took longer than {timeout:g} seconds, this server's limit; ask for fewer tokens"
        late = ApiError(504, message, "timeout", code="timeout", headers=NO_RETRY)
        self._timer = asyncio.get_running_loop().call_later(timeout, self.fail, late)
        running.add(self)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._running.discard(self)
        # A thread may still submit, for nobody.
        self.error = self.error or disconnected()
        self._cancel()

    def check_awaited(self) -> None:
        """Raises if nobody waits for the completions any more."""
        if self.error is not None:
            raise self.error

    def add(self, completion: Completion) -> None:
        """Adds a completion, and cancels it if the exchange has ended meanwhile; called by the submitting thread."""
        self.completions.append(completion)
        if self.error is not None:
            completion.cancel()

    def fail(self, error: ApiError) -> None:
        """Cancels all completions; the client gets the error."""
        if self.error is None:
            self.error = error
            self._failed.set_result(None)
        self._cancel()

    async def run(self, work: Awaitable[T], patience: float = 0) -> T:
        """Awaits work, unless the exchange fails meanwhile, by its client for example: that raises its error.

        Args:
            patience: seconds that the work gets to end by itself then, if the client is still there.
        """
        working, watching = asyncio.ensure_future(work), asyncio.create_task(self._watch())
        try:
            await asyncio.wait([working, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                if patience and not working.done() and self.error.status_code != DISCONNECTED:
                    await asyncio.wait([working], timeout=patience)
                raise self.error
            return working.result()
        finally:
            await _end([working, watching])

    async def results(self) -> list[Result]:
        return [await completion.aresult() for completion in self.completions]

    def _cancel(self) -> None:
        for completion in self.completions:
            completion.cancel()

    async def _watch(self) -> None:
        """Fails the exchange when its client disconnects."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # ASGI servers report a disconnect after the end of a response, too.
        if not self.completions or not all(completion.done for completion in self.completions):
            self._counts.disconnected += 1
        self.fail(disconnected())


class StreamedAnswer(StreamingResponse):
    """A stream of server-sent events, one for each piece of generated text; an error is an event that ends the stream.

    Args:
        exchange: the completions to stream, each as a choice. The stream ends it.
        answer: formats the chunks.
        include_usage: whether a last chunk has the usage, and all others a usage of null.
    """

    def __init__(self, exchange: Exchange, answer: Answer, *, include_usage: bool) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._contents(), media_type="text/event-stream", headers=headers)
        self._exchange, self._answer, self._include_usage = exchange, answer, include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The stream itself tells the client of the exchange's error, and a connection that was closed while data was
        # sent is no failure of the server.
        with self._exchange, suppress(ApiError, OSError):
            await self._exchange.run(self.stream_response(send), patience=LAST_WORDS)

    async def _contents(self) -> AsyncIterator[str]:
        usages: dict[int, Usage] = {}
        for index in range(len(self._exchange.completions)):
            if opening := self._answer.opening(index):
                yield self._written(opening)
        async for index, event in _merged(self._exchange.completions):
            error = self._exchange.error
            if event.finish_reason in ("error", "cancelled"):
                error = error or failed(event.error or "the request was cancelled")
            if error is not None:
                yield _server_sent(error.body())
                return
            if event.usage is not None:
                usages[index] = event.usage
            if event.echo and event.logprobs is not None:
                # Formatting the log-probabilities of a long prompt would block the event loop.
                written = await asyncio.to_thread(self._written_event, index, event)
            else:
                written = self._written_event(index, event)
            if written is not None:
                yield written
        if self._include_usage:
            yield _server_sent(self._answer.closing([usages[index] for index in sorted(usages)]))
        yield "data: [DONE]\n\n"

    def _written_event(self, index: int, event: Event) -> str | None:
        """An event as it is sent; None if it has nothing for the client."""
        chunk = self._answer.chunk(index, event)
        return None if chunk is None else self._written(chunk)

    def _written(self, chunk: dict[str, Any]) -> str:
        return _server_sent(chunk | {"usage": None} if self._include_usage else chunk)


def _server_sent(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _merged(completions: Sequence[Completion]) -> AsyncIterator[tuple[int, Event]]:
    """The events of several completions as they come."""
    if len(completions) == 1:
        async for event in completions[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue(WAITING_CHUNKS)

    async def forward(index: int, completion: Completion) -> None:
        async for event in completion:
            await queue.put((index, event))

    tasks = [asyncio.create_task(forward(*pair)) for pair in enumerate(completions)]
    left = len(tasks)
    try:
        while left:
            index, event = await queue.get()
            left -= event.finish_reason is not None
            yield index, event
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits until they have ended; what they raised is of no interest any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
