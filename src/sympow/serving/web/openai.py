"""OpenAI's API: from the body of a request to the engine, and from the engine to the response.

bodies.py     what a client may ask
Service       asks the engine, in `Service.complete`
exchange.py   waits for the engine, as long as the client does
answers.py    what the client gets
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from sympow.errors import ArgumentError
from sympow.generation.cache import empty_windows, state_nbytes
from sympow.serving.engine.engine import Engine
from sympow.serving.engine.request import Request
from sympow.serving.web.answers import Answer, TokenNames
from sympow.serving.web.bodies import ChatBody, CompletionBody, GenerationBody, Prompt
from sympow.serving.web.contexts import ContextStore
from sympow.serving.web.errors import ApiError, stopping
from sympow.serving.web.exchange import Exchange, StreamedAnswer
from sympow.serving.web.gatekeeping import HttpCounts, ServerOptions

# The most log-probabilities of one response, which take some 100 MB in memory, and as many as text.
MOST_LOGPROBS = 2**20
# Prompts of more characters in all, or more ids, are tokenized one request after another, and delay no shorter ones.
LONG_PROMPTS = 2**16
# Threads that tokenize shorter prompts.
TOKENIZING_THREADS = 2


class Service:
    """The objects that the routes share.

    Args:
        name: the model's name in the API.
        engine: decodes requests with the model.
        contexts: the contexts.
        options: limits of the server.
    """

    def __init__(self, name: str, engine: Engine, contexts: ContextStore, options: ServerOptions) -> None:
        self.name, self.engine, self.contexts, self.options = name, engine, contexts, options
        self.counts = HttpCounts()
        # None for softmax models, whose keys and values grow with the text.
        net = engine.text_model.model
        self._state_bytes = None if net.config.mixer == "softmax" else state_nbytes(empty_windows(net, 1))
        # Threads of its own, so that tokenizing long texts does not block other work in the default thread pool.
        self.tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, "sympow-tokenizing")
        self.tokenizing_long = ThreadPoolExecutor(1, "sympow-tokenizing-long")
        self.stopping = False
        self._names = TokenNames(engine.text_model.tokenizer)
        self._started = int(time.time())
        self._ended = False
        self._running: set[Exchange] = set()

    def stop(self) -> None:
        """Refuses new requests from now on."""
        self.stopping = True

    def fail_running(self) -> None:
        """Ends running requests with an error, and refuses all others."""
        self._ended = True
        for exchange in list(self._running):
            exchange.fail(stopping())

    async def check_open(self) -> None:
        if self.stopping:
            raise stopping()

    def close(self) -> None:
        for threads in (self.tokenizing, self.tokenizing_long):
            threads.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> dict[str, Any]:
        """The model, as OpenAI's API lists models, and what its states take."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "sympow",
            "vocab_size": self.engine.text_model.model.config.vocab_size,
            "state_bytes": self._state_bytes,
            "slot_bytes": self.engine.stats().slot_nbytes,
            "chat": self.engine.text_model.chat is not None,
        }

    async def complete(
        self,
        http: HttpRequest,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        tokens_of: Callable[[str], Iterable[int]] | None = None,
    ) -> Response:
        """Answers a request with the choices for each prompt, as a whole or as a stream.

        Args:
            tokens_of: tokenizes prompts in another way than the engine.
        """
        options, seeds = body.options(), body.seeds()
        self._check_limits(body, options["max_tokens"], len(prompts) * len(seeds))
        prefix = None if body.context is None else await self.contexts.prefix(body.context)
        if self._ended:
            raise stopping()
        with ExitStack() as stack:
            exchange = stack.enter_context(Exchange(http.receive, self.options.timeout, self._running, self.counts))

            def submit() -> None:
                # Tokenizing long texts would block the event loop, so this runs in a thread, and stops when nobody
                # waits for it any more. The choices of a prompt share its tokens.
                requests: list[Request] = []
                for prompt in prompts:
                    exchange.check_awaited()
                    given = tokens_of(prompt) if tokens_of is not None and isinstance(prompt, str) else prompt
                    asked = self.engine.request(given, **options, prefix=prefix, check=exchange.check_awaited)
                    requests += [replace(asked, seed=seed) for seed in seeds]
                _check_logprobs(requests)
                for request in requests:
                    exchange.check_awaited()
                    exchange.add(self.engine.submit(request))

            is_long = sum(map(len, prompts)) > LONG_PROMPTS
            threads = self.tokenizing_long if is_long else self.tokenizing
            await exchange.run(asyncio.get_running_loop().run_in_executor(threads, submit))
            context_tokens = None if prefix is None else prefix.tokens
            answer = Answer(
                body.form, self.name, self._names, context_tokens, tops=bool(options["logprobs"]), choices=len(seeds)
            )
            if body.stream:
                stack.pop_all()
                return StreamedAnswer(exchange, answer, include_usage=body.include_usage)
            results = await exchange.run(exchange.results())
        # Formatting the log-probabilities of long prompts would block the event loop.
        return await asyncio.to_thread(lambda: JSONResponse(answer.whole(results)))

    def _check_limits(self, body: GenerationBody, max_tokens: int, choices: int) -> None:
        """Refuses what this server does not have, or would never have room for."""
        if body.model is not None and body.model != self.name:
            raise _unknown_model(body.model)
        most, name = self.options.max_tokens, body.limit_name
        if max_tokens > most:
            raise ApiError(400, f"{name} must be at most {most:,}, got {max_tokens:,}", param=name)
        stats = self.engine.stats()
        if choices > stats.slots + stats.max_queue:
            message = f"a request must have at most {stats.slots + stats.max_queue:,} choices, got {choices:,}"
            raise ApiError(400, message, param="prompt")


def add_routes(app: FastAPI, service: Service) -> None:
    """The routes below /v1/models, /v1/completions and /v1/chat."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise _unknown_model(name)
        return service.describe()

    @app.post("/v1/completions", dependencies=[Depends(service.check_open)])
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        return await service.complete(http, body, body.prompt)

    @app.post("/v1/chat/completions", dependencies=[Depends(service.check_open)])
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        template = service.engine.text_model.chat
        if template is None:
            message = "this model's tokenizer has no chat template: use /v1/completions"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        messages = [one.for_template() for one in body.messages]
        text = await asyncio.to_thread(template.write, messages)
        return await service.complete(http, body, [text], template.tokens)


def _check_logprobs(requests: list[Request]) -> None:
    """Bounds the number of log-probabilities, all of which are in memory at once, as numbers and as text."""
    each = requests[0].logprobs
    if each is None:
        return
    echoed = sum(len(request.tokens) for request in requests if request.echo is not None)
    generated = sum(request.max_tokens for request in requests)
    count = (echoed + generated) * (each + 1)
    if count > MOST_LOGPROBS:
        raise ArgumentError(
            "logprobs",
            f"must be at most {MOST_LOGPROBS:,} numbers in all choices, (tokens of echoed prompts + "
            f"max_tokens) × (logprobs + 1); got ({echoed:,} + {generated:,}) × {each + 1} = {count:,}",
        )


def _unknown_model(name: str) -> ApiError:
    return ApiError(404, f"there is no model {name[:200]!r} on this server", param="model", code="model_not_found")
