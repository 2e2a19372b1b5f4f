"""`ContextStore`: contexts, texts that are prefilled once for many completions, on disk and partly in memory.

All methods are called by coroutines of one event loop; threads read and write the files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from sympow.data.plain_text import check_text
from sympow.generation.prefix import Prefix
from sympow.serving.engine.completion import Prefilling
from sympow.serving.engine.engine import Engine
from sympow.serving.web.context_folder import ContextFolder, Record, is_id, new_id
from sympow.serving.web.errors import NO_RETRY, ApiError, failed, given_by_client, queue_full

logger = logging.getLogger(__name__)

# How many contexts may be in prefill or wait for it: their texts are in memory.
MOST_READING = 32
# Failed contexts are listed until they are deleted; only so many of the most recent ones are kept.
MOST_FAILED = 64
LONGEST_NAME = 200
# Threads that tokenize the texts of contexts.
TOKENIZING_THREADS = 2


@dataclass(frozen=True)
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
    name: str
    created_at: int
    status: Literal["reading", "ready", "failed"]
    tokens: int
    tokens_read: int
    nbytes: int | None = None
    in_memory: bool = False
    parent: str | None = None
    error: str | None = None

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "object": "context", **asdict(self)}


@dataclass
class Unready:
    """A context that is not on disk: it is being prefilled or written, or it failed.

    Attributes:
        before: number of tokens of the context that it was forked from.
        prefilling: the prefill of its text; None until the text is tokenized, or if the text is empty.
        task: the task that waits for the prefill and writes the context.
    """

    id: str
    name: str
    created_at: int
    parent: str | None
    before: int = 0
    prefilling: Prefilling | None = None
    task: asyncio.Task[None] | None = None
    error: str | None = None
    deleted: bool = False

    def check_kept(self) -> None:
        if self.deleted:
            raise _unknown(self.id)

    def context(self) -> Context:
        total, done = (0, 0) if self.prefilling is None else (self.prefilling.tokens, self.prefilling.done_tokens)
        return Context(
            id=self.id,
            name=self.name,
            created_at=self.created_at,
            status="reading" if self.error is None else "failed",
            tokens=self.before + total,
            tokens_read=self.before + done,
            parent=self.parent,
            error=self.error,
        )


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
        self._reading: dict[str, Unready] = {}
        self._failed: OrderedDict[str, Unready] = OrderedDict()
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
        found += [one.context() for one in (*self._reading.values(), *self._failed.values())]
        return sorted(found, key=lambda context: (-context.created_at, context.id))

    def get(self, id_: str) -> Context:
        unready = self._reading.get(id_) or self._failed.get(id_)
        if unready is not None:
            return unready.context()
        record = self._folder.find(id_)
        if record is None:
            self._memory.pop(id_, None)
            raise _unknown(id_)
        return self._ready(record)

    async def create(self, text: str, name: str) -> Context:
        """Starts to prefill a text."""
        if not text:
            raise ApiError(400, "text must not be empty", param="text")
        return await self._begin(text, name, None)

    async def fork(self, id_: str, text: str, name: str) -> Context:
        """Starts to prefill a text after another context, which is not changed; the text may be empty."""
        return await self._begin(text, name, id_)

    async def delete(self, id_: str) -> None:
        """Deletes a context, and cancels its prefill. Requests that have started from it continue."""
        if self._failed.pop(id_, None) is not None:
            return
        self.get(id_)
        unready = self._reading.get(id_)
        if unready is not None:
            unready.deleted = True
            if unready.prefilling is not None:
                unready.prefilling.cancel()
            if unready.task is not None:
                await asyncio.wait([unready.task])
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
        for unready in list(self._reading.values()):
            if unready.prefilling is not None:
                unready.prefilling.cancel()
        tasks = [one.task for one in self._reading.values() if one.task is not None]
        if tasks:
            await asyncio.wait([*tasks])
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._folder.close)

    async def _begin(self, text: str, name: str, parent: str | None) -> Context:
        if len(name) > LONGEST_NAME:
            raise ApiError(400, f"name must have at most {LONGEST_NAME} characters, got {len(name):,}", param="name")
        with given_by_client(("name",)):
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
        unready = Unready(new_id(), name, int(time.time()), parent)
        # Registered before the first await, so that concurrent requests do not exceed the limits above.
        self._reading[unready.id] = unready
        try:
            before = None if parent is None else await self.prefix(parent)
            unready.before = 0 if before is None else before.tokens
            if text:
                submit = partial(self._engine.submit_prefill, text, prefix=before, check=unready.check_kept)
                with given_by_client(("text",)):
                    unready.prefilling = await asyncio.get_running_loop().run_in_executor(self._tokenizing, submit)
        except BaseException:
            del self._reading[unready.id]
            raise
        if unready.deleted and unready.prefilling is not None:
            unready.prefilling.cancel()
        unready.task = asyncio.create_task(self._finish(unready, before))
        return unready.context()

    async def _finish(self, unready: Unready, before: Prefix | None) -> None:
        """Waits for the prefix of a context and writes it."""
        try:
            prefix = before if unready.prefilling is None else await unready.prefilling.aresult()
            assert prefix is not None
            record = Record(unready.id, unready.name, unready.created_at, prefix.tokens, prefix.nbytes, unready.parent)
            if not unready.deleted:
                await asyncio.to_thread(self._folder.write, record, prefix)
                self._remember(unready.id, prefix)
        except (RuntimeError, OSError) as error:
            # The engine, the device (no memory for a copy) or the disk failed. The client gets no path of the server.
            unready.error = f"it cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
            if not unready.deleted:
                self._failed[unready.id] = unready
                while len(self._failed) > MOST_FAILED:
                    self._failed.popitem(last=False)
        finally:
            unready.task = None
            del self._reading[unready.id]

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
