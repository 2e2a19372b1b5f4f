"""Contexts, texts that are prefilled once for many completions: the routes below /v1/contexts and what they work on.

`ContextStore` has them on disk and partly in memory. All its methods are called by coroutines of one event loop;
threads read and write the files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, Literal

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.params import Depends
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile

from sympow.data.plain_text import check_text, decode
from sympow.generation.prefix import Prefix
from sympow.serving.engine.completion import Prefilling
from sympow.serving.engine.engine import Engine
from sympow.serving.web.bodies import StrictModel
from sympow.serving.web.context_folder import ContextFolder, Record, is_id, new_id
from sympow.serving.web.errors import NO_RETRY, ApiError, failed, not_sent_as_json, queue_full

logger = logging.getLogger(__name__)

# How many contexts may be in prefill or wait for it: their texts are in memory.
MOST_READING = 32
# Failed contexts are listed until they are deleted; only so many of the most recent ones are kept.
MOST_FAILED = 64
LONGEST_NAME = 200
# Threads that tokenize the texts of contexts.
TOKENIZING_THREADS = 2
# Encodings of an uploaded form, as its header may name them.
UTF8 = (b"utf-8", b"utf8")
# Parts of an uploaded form: the file, and the context's name.
FORM_LIMITS: dict[str, Any] = {"max_files": 1, "max_fields": 8, "max_part_size": 2**16}


@dataclass
class Context:
    """A context as users see it.

    Attributes:
        status: "reading" (in prefill), "ready" or "failed"; completions can name it when it is ready.
        tokens: number of tokens, including those of the context that it was forked from.
        tokens_read: how many of them are prefilled.
        nbytes: bytes of its state; None until it is ready.
        in_memory: whether its state is in memory; otherwise the next completion loads it from disk.
        error: why it failed.
    """

    id: str
    object: Literal["context"] = field(default="context", init=False)
    name: str
    created_at: int
    parent: str | None
    status: Literal["reading", "ready", "failed"] = "reading"
    tokens: int = 0
    tokens_read: int = 0
    nbytes: int | None = None
    in_memory: bool = False
    error: str | None = None


@dataclass
class Reading:
    """The work on a context that is being prefilled or written.

    Attributes:
        prefilling: the prefill of its text; None until the text is tokenized, or if the text is empty.
        task: the task that waits for the prefill and writes the context.
    """

    context: Context
    prefilling: Prefilling | None = None
    task: asyncio.Task[None] | None = None
    deleted: bool = False

    def check_kept(self) -> None:
        if self.deleted:
            raise _unknown(self.context.id)

    def cancel(self) -> None:
        if self.prefilling is not None:
            self.prefilling.cancel()


class ContextStore:
    """Contexts of an engine's model.

    Args:
        engine: prefills the contexts.
        folder: where contexts are kept on disk.
        budget: bytes of states in memory, on the model's device; beyond it the least recently used are evicted.
        max_contexts: the most contexts.
    """

    def __init__(self, engine: Engine, folder: ContextFolder, budget: int, max_contexts: int) -> None:
        self._engine, self._folder = engine, folder
        self.budget, self._max_contexts = budget, max_contexts
        self._reading: dict[str, Reading] = {}
        self._failed: OrderedDict[str, Context] = OrderedDict()
        self._memory: OrderedDict[str, Prefix] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Prefix]] = {}
        # Threads of its own, so that tokenizing a long text delays nothing else.
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, "sympow-contexts")
        self.hits = self.loads = self.dropped = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the states in memory."""
        return sum(prefix.total_nbytes for prefix in self._memory.values())

    @property
    def in_memory(self) -> int:
        return len(self._memory)

    @property
    def reading(self) -> int:
        return len(self._reading)

    def list(self) -> list[Context]:
        """All contexts, the newest first."""
        # A context is in the folder a moment before the thread that wrote it is waited for.
        there = self._folder.records()
        found = [self._ready(record) for id_, record in there.items() if id_ not in self._reading]
        found += [*(reading.context for reading in self._reading.values()), *self._failed.values()]
        return sorted(found, key=lambda context: (-context.created_at, context.id))

    def get(self, id_: str) -> Context:
        if id_ in self._reading:
            return self._reading[id_].context
        if id_ in self._failed:
            return self._failed[id_]
        record = self._folder.find(id_)
        if record is None:
            self._memory.pop(id_, None)
            raise _unknown(id_)
        return self._ready(record)

    async def create(self, text: str, name: str, parent: str | None = None) -> Context:
        """Starts to prefill a text.

        Args:
            parent: id of the context that the text follows, which is not changed; the text may then be empty.
        """
        if not text and parent is None:
            raise ApiError(400, "text must not be empty", param="text")
        if len(name) > LONGEST_NAME:
            raise ApiError(400, f"name must have at most {LONGEST_NAME} characters, got {len(name):,}", param="name")
        # No response could hold such a name, so it would break the list of contexts for all clients.
        check_text("name", name)
        if not self._folder.exists():
            message = "the server's folder of contexts has been removed: contexts can be made after a restart"
            raise ApiError(500, message, "server_error", code="contexts_removed", headers=NO_RETRY)
        if len(self._reading) >= MOST_READING:
            raise queue_full(f"{MOST_READING} contexts are being read already; try again later")
        there = len(self._folder.records().keys() | self._reading.keys())
        if there >= self._max_contexts:
            message = f"there are {there:,} contexts, as many as this server keeps: delete one first"
            raise ApiError(400, message, code="too_many_contexts")
        context = Context(new_id(), name, int(time.time()), parent)
        # Registered before the first await, so that concurrent requests do not exceed the limits above.
        reading = self._reading[context.id] = Reading(context)
        try:
            before = None if parent is None else await self.prefix(parent)
            context.tokens = context.tokens_read = start = 0 if before is None else before.tokens

            def progress(done: int, _: int) -> None:
                context.tokens_read = start + done

            if text:
                submit = partial(
                    self._engine.submit_prefill, text, prefix=before, progress=progress, check=reading.check_kept
                )
                reading.prefilling = await asyncio.get_running_loop().run_in_executor(self._tokenizing, submit)
                context.tokens += reading.prefilling.tokens
        except BaseException:
            del self._reading[context.id]
            raise
        if reading.deleted:
            reading.cancel()
        reading.task = asyncio.create_task(self._finish(reading, before))
        return context

    async def delete(self, id_: str) -> None:
        """Deletes a context, and cancels its prefill. Requests that have started from it continue."""
        if self._failed.pop(id_, None) is not None:
            return
        self.get(id_)
        reading = self._reading.get(id_)
        if reading is not None:
            reading.deleted = True
            reading.cancel()
            if reading.task is not None:
                await asyncio.wait([reading.task])
        await asyncio.to_thread(self._folder.remove, id_)
        # A request may have loaded it until now; later ones do not find it any more.
        self._memory.pop(id_, None)

    async def prefix(self, id_: str) -> Prefix:
        """The state of a context, for a completion.

        Raises:
            ApiError: the context does not exist, is still in prefill, failed, or is damaged.
        """
        context = self.get(id_)
        if context.status == "reading":
            raise ApiError(
                409,
                f"context {id_} is still being read: {context.tokens_read:,} of {context.tokens:,} tokens",
                param="context",
                code="context_not_ready",
                headers={"retry-after": "1"},
            )
        if context.status == "failed":
            raise ApiError(400, f"context {id_} failed: {context.error}", param="context", code="context_failed")
        if id_ in self._memory:
            self.hits += 1
            self._memory.move_to_end(id_)
            return self._memory[id_]
        if id_ not in self._loading:
            self._loading[id_] = asyncio.create_task(self._load(id_))
        return await asyncio.shield(self._loading[id_])

    async def close(self) -> None:
        """Cancels running prefills, and waits for files that are being written."""
        for reading in self._reading.values():
            reading.cancel()
        tasks = [one.task for one in self._reading.values() if one.task is not None]
        if tasks:
            await asyncio.wait([*tasks])
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._folder.close)

    async def _finish(self, reading: Reading, before: Prefix | None) -> None:
        """Waits for the prefix of a context and writes it."""
        context = reading.context
        try:
            prefix = before if reading.prefilling is None else await reading.prefilling.aresult()
            assert prefix is not None
            record = Record(context.id, context.name, context.created_at, prefix.tokens, prefix.nbytes, context.parent)
            if not reading.deleted:
                await asyncio.to_thread(self._folder.write, record, prefix)
                self._remember(context.id, prefix)
        except (RuntimeError, OSError) as error:
            # The engine, the device (no memory for a copy) or the disk failed. The client gets no path of the server.
            context.status = "failed"
            context.error = f"it cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
            if not reading.deleted:
                self._failed[context.id] = context
                while len(self._failed) > MOST_FAILED:
                    self._failed.popitem(last=False)
        finally:
            reading.task = None
            del self._reading[context.id]

    async def _load(self, id_: str) -> Prefix:
        """Loads a context from disk; concurrent requests for it share one load."""
        try:
            prefix = await asyncio.to_thread(self._folder.load, id_)
        except FileNotFoundError as error:
            raise _unknown(id_) from error
        except (OSError, ValueError) as error:
            logger.error("context %s cannot be read: %s", id_, error)
            if isinstance(error, OSError):
                # It may be read another time, such as when fewer files are open.
                raise failed(f"context {id_} cannot be read from the server's disk: {error.strerror}") from error
            message = f"context {id_} is damaged on the server's disk: delete it, and make it again"
            raise ApiError(500, message, "server_error", code="context_damaged", headers=NO_RETRY) from error
        finally:
            del self._loading[id_]
        if self._folder.find(id_) is None:
            # It was deleted meanwhile.
            raise _unknown(id_)
        self.loads += 1
        self._remember(id_, prefix)
        return prefix

    def _remember(self, id_: str, prefix: Prefix) -> None:
        """Keeps a state in memory, and evicts others for it; a state that alone exceeds the budget is not kept."""
        self._memory[id_] = prefix
        while self._memory and self.nbytes > self.budget:
            self._memory.popitem(last=False)
            self.dropped += 1

    def _ready(self, record: Record) -> Context:
        in_memory = record.id in self._memory
        return Context(**asdict(record), status="ready", tokens_read=record.tokens, in_memory=in_memory)


def _unknown(id_: str) -> ApiError:
    # An id from a client may be long, or not printable.
    shown = id_ if is_id(id_) else repr(id_[:64])
    return ApiError(404, f"there is no context {shown}", param="context", code="context_not_found")


class ContextBody(StrictModel):
    """The body of `/v1/contexts` as JSON."""

    text: str
    name: str = ""


class ForkBody(ContextBody):
    """The body of `/v1/contexts/ID/fork`."""

    text: str = ""


# FastAPI has no routes that take JSON or a form, so this one parses its body itself.
FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "name": {"type": "string"}},
    "required": ["file"],
}
EITHER_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": ContextBody.model_json_schema()},
            "multipart/form-data": {"schema": FORM},
        },
    }
}


def add_routes(app: FastAPI, contexts: ContextStore, while_open: list[Depends]) -> None:
    """The routes below /v1/contexts; those that begin a prefill have the dependencies `while_open`."""

    @app.post("/v1/contexts", openapi_extra=EITHER_BODY, dependencies=while_open)
    async def create(http: HttpRequest) -> Context:
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            body = await _uploaded(http)
        elif kind == "application/json":
            body = ContextBody.model_validate_json(await http.body())
        else:
            raise not_sent_as_json()
        return await contexts.create(body.text, body.name)

    @app.get("/v1/contexts")
    async def all_contexts() -> dict[str, Any]:
        return {"object": "list", "data": contexts.list()}

    @app.get("/v1/contexts/{id_}")
    async def one(id_: str) -> Context:
        return contexts.get(id_)

    @app.delete("/v1/contexts/{id_}")
    async def delete(id_: str) -> dict[str, Any]:
        await contexts.delete(id_)
        return {"id": id_, "object": "context.deleted", "deleted": True}

    @app.post("/v1/contexts/{id_}/fork", dependencies=while_open)
    async def fork(id_: str, body: ForkBody) -> Context:
        return await contexts.create(body.text, body.name, parent=id_)


async def _uploaded(http: HttpRequest) -> ContextBody:
    """The text and the name in an uploaded form; the name is by default that of the file."""
    charset = parse_options_header(http.headers["content-type"])[1].get(b"charset", b"utf-8")
    if charset.lower() not in UTF8:
        # Other encodings of Python can express what is not text, or fail with errors of their own.
        message = f"a form must be sent without a charset, or as UTF-8; got charset={charset.decode('latin-1')[:100]!r}"
        raise ApiError(400, message, code="not_utf8")
    async with http.form(**FORM_LIMITS) as form:
        file, name = form.get("file"), form.get("name", "")
        if unknown := sorted(form.keys() - {"file", "name"}):
            raise ApiError(400, f"Unrecognized request argument supplied: {unknown[0][:100]}", code="unknown_parameter")
        if not isinstance(file, UploadFile) or not isinstance(name, str):
            raise ApiError(400, "file must be a file, and name a text, in a form of multipart/form-data", param="file")
        content = await file.read()
        given = name or PurePath(file.filename or "").name[-100:]
    try:
        text = await asyncio.to_thread(decode, content, "file")
    except ValueError as error:
        raise ApiError(400, str(error), param="file", code="not_utf8") from error
    return ContextBody.model_construct(text=text, name=given)
