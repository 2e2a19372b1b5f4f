"""Sends completions from the engine to a client, as a whole or as a stream.

A `Group` holds the completions of one HTTP request. `Group.fail` is the only way to end it early: when the client
disconnects, when the request times out, or when the server stops. Its slots are then free at the engine's next step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sympow.serving.engine.completion import Completion, Event, RequestError, Result, Usage
from sympow.serving.web.errors import DISCONNECTED, ApiError, disconnected, failed, timed_out
from sympow.serving.web.metrics import HttpCounts
from sympow.serving.web.openai import Answer

# Events of several completions that are queued for a slow client; further ones stay with their completions.
WAITING_CHUNKS = 64


class Group:
    """The completions of one HTTP request.

    Args:
        timeout: seconds that the request may take.
        running: the running groups of the server; this one is in it until it ends.
        counts: counts clients that disconnect.
    """

    def __init__(self, timeout: float, running: set[Group], counts: HttpCounts) -> None:
        self.completions: list[Completion] = []
        self.error: ApiError | None = None
        self._discarded = False
        self._counts, self._running = counts, running
        self._failed = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(timeout, lambda: self.fail(timed_out(timeout)))
        running.add(self)

    @property
    def ended(self) -> bool:
        """Whether nobody waits for its completions any more."""
        return self._discarded or self.error is not None

    def add(self, completion: Completion) -> None:
        """Adds a completion, and cancels it if the group has ended meanwhile; called by the submitting thread."""
        self.completions.append(completion)
        if self.ended:
            completion.cancel()

    def fail(self, error: ApiError) -> None:
        """Cancels all completions; the client gets the error."""
        if self.error is None:
            self.error = error
            self._failed.set()
        for completion in self.completions:
            completion.cancel()

    def discard(self) -> None:
        """Removes the group from the server, and cancels completions that have not ended."""
        self._discarded = True
        self._timer.cancel()
        self._running.discard(self)
        for completion in self.completions:
            completion.cancel()

    async def failure(self) -> None:
        """Returns when the group fails."""
        await self._failed.wait()

    async def watch(self, receive: Receive) -> None:
        """Fails the group when its client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        # ASGI servers report a disconnect after the end of a response, too.
        if not self.completions or not all(completion.done for completion in self.completions):
            self._counts.disconnected += 1
        self.fail(disconnected())


async def answer_whole(request: Request, group: Group) -> list[Result]:
    """Waits for all completions of a group.

    Raises:
        ApiError: one failed, or the group did.
    """

    async def results() -> list[Result]:
        return [await completion.aresult() for completion in group.completions]

    working = asyncio.create_task(results())
    others = [asyncio.create_task(group.watch(request.receive)), asyncio.create_task(group.failure())]
    try:
        await asyncio.wait([working, others[1]], return_when=asyncio.FIRST_COMPLETED)
        if group.error is not None:
            raise group.error
        return working.result()
    except RequestError as error:
        raise failed(str(error)) from error
    finally:
        group.discard()
        await _end([working, *others])


class StreamedAnswer(Response):
    """A stream of server-sent events, one for each piece of generated text; an error is an event that ends the stream.

    Args:
        group: the completions to stream, each as a choice.
        answer: formats the chunks.
        include_usage: whether a last chunk has the usage, and all others a usage of null.
    """

    def __init__(self, group: Group, answer: Answer, *, include_usage: bool) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._group, self._answer, self._include_usage = group, answer, include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._group.watch(receive))
        sending = asyncio.create_task(self._send(send))
        failing = asyncio.create_task(self._group.failure())
        try:
            await asyncio.wait([sending, failing], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done() and self._group.error is not None and self._group.error.status != DISCONNECTED:
                # The stream sends the error, unless the client does not read it in time.
                await asyncio.wait([sending], timeout=5)
            if sending.done() and not sending.cancelled():
                # A connection that was closed while data was sent is no failure of the server.
                with suppress(OSError):
                    sending.result()
        finally:
            self._group.discard()
            await _end([sending, watching, failing])

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for content in self._contents():
            await send({"type": "http.response.body", "body": f"data: {content}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _contents(self) -> AsyncIterator[str]:
        """The data of each event."""
        usages: dict[int, Usage] = {}
        for index in range(len(self._group.completions)):
            if opening := self._answer.opening(index):
                yield self._written(opening)
        async for index, event in _merged(self._group.completions):
            error = self._group.error
            if event.finish_reason in ("error", "cancelled"):
                error = error or failed(event.error or "the request was cancelled")
            if error is not None:
                yield json.dumps(error.body())
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
            yield json.dumps(self._answer.closing([usages[index] for index in sorted(usages)]))
        yield "[DONE]"

    def _written_event(self, index: int, event: Event) -> str | None:
        """The data of an event; None if it has nothing for the client."""
        chunk = self._answer.chunk(index, event)
        return None if chunk is None else self._written(chunk)

    def _written(self, chunk: dict[str, Any]) -> str:
        return json.dumps(chunk | {"usage": None} if self._include_usage else chunk)


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


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until they have ended; what they raised is of no interest any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
