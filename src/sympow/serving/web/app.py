"""The HTTP server as an ASGI application on FastAPI: `create_app`.

| | |
|---|---|
| `GET /v1/models`, `GET /v1/models/NAME` | the model |
| `POST /v1/completions`, `POST /v1/chat/completions` | as OpenAI's, whole or as a stream |
| `POST /v1/contexts`, `GET`, `DELETE /v1/contexts/ID`, `POST /v1/contexts/ID/fork` | texts that are prefilled once |
| `GET /health`, `GET /metrics` | for load balancers and Prometheus |
| `GET /` | a web page to try the model with |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

import sympow
from sympow.data.plain_text import decode
from sympow.generation.cache import empty_windows, state_nbytes
from sympow.generation.prefix import Prefix
from sympow.serving.engine.engine import Engine, TokenizedPrompt
from sympow.serving.engine.scheduler import EngineClosedError, QueueFullError
from sympow.serving.web.contexts import ContextStore
from sympow.serving.web.errors import ApiError, disconnected, from_argument_error, queue_full, stopping
from sympow.serving.web.exchange import Group, StreamedAnswer, answer_whole
from sympow.serving.web.gatekeeping import Gatekeeper, error_response
from sympow.serving.web.metrics import CONTENT_TYPE, HttpCounts, exposition
from sympow.serving.web.openai import (
    Answer,
    ChatRequest,
    CompletionRequest,
    Form,
    GenerationRequest,
    Job,
    TokenNames,
    chat_jobs,
    completion_jobs,
)

# The page's files by ending; anything else in its folder is not served.
PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
ROUTES = (
    *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/contexts", "/health", "/metrics"),
    "/openapi.json",
)
# The most log-probabilities of one response, which take some 100 MB in memory, and as many as text.
MOST_LOGPROBS = 2**20
# Prompts of more characters in all, or more ids, are tokenized one request after another, and delay no shorter ones.
LONG_PROMPTS = 2**16
# Threads that tokenize shorter prompts.
TOKENIZING_THREADS = 2
# Encodings of an uploaded form, as its header may name them.
UTF8 = (b"utf-8", b"utf8")
# Parts of an uploaded form: the file, and the context's name.
FORM_LIMITS: dict[str, Any] = {"max_files": 1, "max_fields": 8, "max_part_size": 2**16}

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class ServerOptions:
    """Limits of the server.

    Attributes:
        api_keys: API keys, of which a request must send one; empty: no key is needed.
        hosts: names that the Host header may have; None: any.
        max_body: the most bytes of a request body.
        max_tokens: the largest max_tokens of a request.
        timeout: seconds that a request may take after its body has arrived.
    """

    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    max_body: int = 2**26
    max_tokens: int = 2**16
    timeout: float = 600.0


class ContextRequest(BaseModel):
    """A request for `/v1/contexts` as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str
    name: str = ""


class ForkRequest(BaseModel):
    """A request for `/v1/contexts/ID/fork`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = ""
    name: str = ""


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
        # None for softmax models, whose keys and values grow with the text.
        net = engine.text_model.model
        self.state_bytes = None if net.config.mixer == "softmax" else state_nbytes(empty_windows(net, 1))
        self.counts = HttpCounts()
        # Threads of its own, so that tokenizing long texts does not block other work in the default thread pool.
        self.tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, "sympow-tokenizing")
        self.tokenizing_long = ThreadPoolExecutor(1, "sympow-tokenizing-long")
        self.names = TokenNames(engine.text_model.tokenizer)
        self.started = int(time.time())
        self.stopping = False
        self._ended = False
        self._groups: set[Group] = set()

    def stop(self) -> None:
        """Refuses new requests from now on."""
        self.stopping = True

    def fail_running(self) -> None:
        """Ends running requests with an error, and refuses all others."""
        self._ended = True
        for group in list(self._groups):
            group.fail(stopping())

    def check_open(self) -> None:
        if self.stopping:
            raise stopping()

    async def complete(self, request: Request, jobs: list[Job], body: GenerationRequest, form: Form) -> Response:
        """Answers a request with a choice for each job."""
        if body.model is not None and body.model != self.name:
            raise _unknown_model(body.model)
        most = self.options.max_tokens
        if jobs[0].max_tokens > most:
            name = body.limit_name
            raise ApiError(400, f"{name} must be at most {most:,}, got {jobs[0].max_tokens:,}", param=name)
        stats = self.engine.stats()
        if len(jobs) > stats.slots + stats.max_queue:
            message = f"a request must have at most {stats.slots + stats.max_queue:,} choices, got {len(jobs):,}"
            raise ApiError(400, message, param="prompt")
        prefix = None if body.context is None else await self.contexts.prefix(body.context)
        group = await self._submit(request, jobs, prefix, body, form)
        tokens = None if prefix is None else prefix.tokens
        answer = Answer(form, self.name, self.names, tokens, tops=bool(jobs[0].logprobs), choices=body.n or 1)
        if body.stream:
            return StreamedAnswer(group, answer, include_usage=body.include_usage)
        results = await answer_whole(request, group)
        # Formatting the log-probabilities of long prompts would block the event loop.
        return await asyncio.to_thread(lambda: JSONResponse(answer.whole(results)))

    async def _submit(
        self, request: Request, jobs: list[Job], prefix: Prefix | None, body: GenerationRequest, form: Form
    ) -> Group:
        """Submits all jobs to the engine, or none."""
        if self._ended:
            raise stopping()
        group = Group(self.options.timeout, self._groups, self.counts)

        def check_awaited() -> None:
            if group.ended:
                raise group.error or disconnected()

        def submit_all() -> None:
            # Tokenizing long texts would block the event loop, so this runs in a thread, and stops when the group has
            # ended. Choices of the same prompt are adjacent and share one tokenized prompt.
            tokenized: list[TokenizedPrompt] = []
            for before, job in zip([None, *jobs], jobs, strict=False):
                check_awaited()
                if before is None or before.prompt is not job.prompt:
                    given: str | Iterable[int] = job.prompt
                    if form == "chat":
                        assert self.engine.text_model.chat is not None
                        assert isinstance(given, str)
                        given = self.engine.text_model.chat.tokens(given)
                    tokenized.append(self.engine.tokenize(given, prefix, check_awaited))
                else:
                    tokenized.append(tokenized[-1])
            _check_logprobs(jobs, tokenized)
            for job, prompt in zip(jobs, tokenized, strict=True):
                check_awaited()
                group.add(self.engine.submit(prompt, job.sampling, prefix=prefix, **job.options()))

        is_long = sum(len(job.prompt) for job in jobs[:: body.n or 1]) > LONG_PROMPTS
        threads = self.tokenizing_long if is_long else self.tokenizing
        submitting = asyncio.get_running_loop().run_in_executor(threads, submit_all)
        # Marks an exception as retrieved, in case the group has ended and nobody awaits the result.
        submitting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        failing = asyncio.create_task(group.failure())
        watching = asyncio.create_task(group.watch(request.receive))
        try:
            await asyncio.wait([submitting, failing], return_when=asyncio.FIRST_COMPLETED)
            if group.error is not None:
                # The thread ends after the piece that it is tokenizing.
                raise group.error
            submitting.result()
        except QueueFullError as error:
            group.discard()
            raise queue_full(f"the server is busy: {error}") from error
        except EngineClosedError as error:
            group.discard()
            raise stopping() from error
        except (ValueError, TypeError) as error:
            group.discard()
            raise from_argument_error(error, type(body).model_fields) from error
        except BaseException:
            group.discard()
            raise
        finally:
            failing.cancel()
            watching.cancel()
        return group


def _check_logprobs(jobs: list[Job], prompts: list[TokenizedPrompt]) -> None:
    """Bounds the number of log-probabilities, all of which are in memory at once, as numbers and as text."""
    each = jobs[0].logprobs
    if each is None:
        return
    echoed = sum(len(prompt.tokens) for job, prompt in zip(jobs, prompts, strict=True) if job.echo)
    generated = sum(job.max_tokens for job in jobs)
    count = (echoed + generated) * (each + 1)
    if count > MOST_LOGPROBS:
        raise ValueError(
            f"logprobs must be at most {MOST_LOGPROBS:,} numbers in all choices, (tokens of echoed prompts + "
            f"max_tokens) × (logprobs + 1); got ({echoed:,} + {generated:,}) × {each + 1} = {count:,}"
        )


def create_app(service: Service) -> ASGIApp:
    """The application, behind the middleware that checks requests."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.contexts.close()
        for threads in (service.tokenizing, service.tokenizing_long):
            threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(service.engine.close)

    app = FastAPI(
        title="sympow",
        version=sympow.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_models(app, service)
    _add_completions(app, service)
    _add_contexts(app, service)
    _add_monitoring(app, service)
    page = _add_page(app)
    options = service.options
    return Gatekeeper(
        app,
        keys=options.api_keys,
        public=("/health", *page),
        hosts=options.hosts,
        max_body=options.max_body,
        counts=service.counts,
        routes=ROUTES,
    )


def _add_errors(app: FastAPI) -> None:
    """Returns errors of routes and HTTP errors, such as an unknown path, in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def _(_request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        unknown = error.status_code in (404, 405)
        message = f"unknown request: {request.method} {request.url.path}"[:300] if unknown else str(error.detail)
        code = "unknown_url" if unknown else None
        return error_response(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def _(_request: Request, _error: Exception) -> Response:
        # The server prints the traceback; the client gets no details.
        return error_response(ApiError(500, "the server failed on this request", "server_error"))


def _add_models(app: FastAPI, service: Service) -> None:
    def described() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.started,
            "owned_by": "sympow",
            "vocab_size": service.engine.text_model.model.config.vocab_size,
            "state_bytes": service.state_bytes,
            "slot_bytes": service.engine.stats().slot_nbytes,
            "chat": service.engine.text_model.chat is not None,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise _unknown_model(name)
        return described()


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        service.check_open()
        body = await _json(request, CompletionRequest)
        jobs = _checked(lambda: completion_jobs(body), body)
        return await service.complete(request, jobs, body, "completion")

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        service.check_open()
        body = await _json(request, ChatRequest)
        template = service.engine.text_model.chat
        if template is None:
            message = "this model's tokenizer has no chat template: use /v1/completions"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        messages = [one.for_template() for one in body.messages]
        prompt = await asyncio.to_thread(_checked, lambda: template.write(messages), body)
        jobs = _checked(lambda: chat_jobs(body, prompt), body)
        return await service.complete(request, jobs, body, "chat")


def _add_contexts(app: FastAPI, service: Service) -> None:
    contexts = service.contexts

    @app.post("/v1/contexts", openapi_extra=_context_schema())
    async def create(request: Request) -> dict[str, Any]:
        service.check_open()
        if _content_type(request) == "multipart/form-data":
            text, name = await _uploaded(request)
        else:
            body = await _json(request, ContextRequest)
            text, name = body.text, body.name
        return (await contexts.create(text, name)).body()

    @app.get("/v1/contexts")
    async def all_contexts() -> dict[str, Any]:
        return {"object": "list", "data": [context.body() for context in contexts.list()]}

    @app.get("/v1/contexts/{id_}")
    async def one(id_: str) -> dict[str, Any]:
        return contexts.get(id_).body()

    @app.delete("/v1/contexts/{id_}")
    async def delete(id_: str) -> dict[str, Any]:
        await contexts.delete(id_)
        return {"id": id_, "object": "context.deleted", "deleted": True}

    @app.post("/v1/contexts/{id_}/fork", openapi_extra=_body_schema(ForkRequest))
    async def fork(id_: str, request: Request) -> dict[str, Any]:
        service.check_open()
        body = await _json(request, ForkRequest)
        return (await contexts.fork(id_, body.text, body.name)).body()


def _add_monitoring(app: FastAPI, service: Service) -> None:
    # Some probes send HEAD. A route for both methods would have one operation id for both in /openapi.json.
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        alive = not service.stopping and service.engine.alive
        status = "ok" if alive else "stopping" if service.stopping else "failed"
        return JSONResponse({"status": status}, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = exposition(service.engine.stats(), service.contexts, service.counts)
        return Response(text, media_type=CONTENT_TYPE)


def _add_page(app: FastAPI) -> list[str]:
    """Serves the files of the page; returns their paths."""
    paths = []
    for file in resources.files("sympow.serving").joinpath("page").iterdir():
        kind = PAGE_TYPES.get(PurePath(file.name).suffix)
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(_serves(file.read_bytes(), kind))
            paths.append(path)
    return paths


def _serves(content: bytes, kind: str) -> Callable[[], Any]:
    async def serve() -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    return serve


async def _json(request: Request, model: type[Model]) -> Model:
    """The validated JSON body of a request."""
    if _content_type(request) != "application/json":
        raise ApiError(400, "the body must be JSON: send it with `Content-Type: application/json`", code="not_json")
    content = await request.body()
    try:
        return await asyncio.to_thread(model.model_validate_json, content)
    except ValidationError as error:
        raise _invalid(error, model) from error


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _invalid(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """A 400 response that names the first error in a body."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # The location also contains names of union members, which are left out: they are not fields.
    whole = first["loc"]
    place = [part for part in whole if isinstance(part, int) or part.islower()]
    param = ".".join(map(str, place[:1])) or None
    where = ".".join(map(str, place))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        # The client chose this name, which may have any characters and length.
        where, param = ".".join(map(str, whole))[:100], str(whole[0])[:100]
        return ApiError(400, f"Unrecognized request argument supplied: {where}", param=param, code="unknown_parameter")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}", code="not_json")
    if param is None:
        return from_argument_error(ValueError(message), model.model_fields)
    return ApiError(400, f"{where}: {message}", param=param)


def _checked(call: Callable[[], Any], body: BaseModel) -> Any:
    """Calls a function, and turns a ValueError or TypeError into a 400 response."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        raise from_argument_error(error, type(body).model_fields) from error


async def _uploaded(request: Request) -> tuple[str, str]:
    """The text and the name in an uploaded form; the name is by default that of the file."""
    charset = parse_options_header(request.headers["content-type"])[1].get(b"charset", b"utf-8")
    if charset.lower() not in UTF8:
        # Other encodings of Python can express what is not text, or fail with errors of their own.
        message = f"a form must be sent without a charset, or as UTF-8; got charset={charset.decode('latin-1')[:100]!r}"
        raise ApiError(400, message, code="not_utf8")
    async with request.form(**FORM_LIMITS) as form:
        file, name = form.get("file"), form.get("name", "")
        if unknown := sorted(form.keys() - {"file", "name"}):
            raise ApiError(400, f"Unrecognized request argument supplied: {unknown[0][:100]}", code="unknown_parameter")
        if not isinstance(file, UploadFile) or not isinstance(name, str):
            raise ApiError(400, "file must be a file, and name a text, in a form of multipart/form-data", param="file")
        content = await file.read()
        given = name or PurePath(file.filename or "").name[-100:]
    try:
        return await asyncio.to_thread(decode, content, "file"), given
    except ValueError as error:
        raise ApiError(400, str(error), param="file", code="not_utf8") from error


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The description of a body in /openapi.json; FastAPI cannot derive it, since routes parse bodies themselves."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def _context_schema() -> dict[str, Any]:
    """The description of the body of `POST /v1/contexts`, JSON or a form."""
    described = _body_schema(ContextRequest)
    properties = {"file": {"type": "string", "format": "binary"}, "name": {"type": "string"}}
    form = {"type": "object", "properties": properties, "required": ["file"]}
    described["requestBody"]["content"]["multipart/form-data"] = {"schema": form}
    return described


def _unknown_model(name: str) -> ApiError:
    return ApiError(404, f"there is no model {name[:200]!r} on this server", param="model", code="model_not_found")
