"""The HTTP server as an ASGI application on FastAPI: `create_app`.

| | |
|---|---|
| `GET /v1/models`, `GET /v1/models/NAME` | `openai.py`: the model |
| `POST /v1/completions`, `POST /v1/chat/completions` | `openai.py`: whole or as a stream |
| `POST /v1/contexts`, `GET`, `DELETE /v1/contexts/ID`, `POST /v1/contexts/ID/fork` | `contexts.py`: prefilled texts |
| `GET /health`, `GET /metrics` | for load balancers and Prometheus |
| `GET /` | a web page to try the model with |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import PurePath

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import sympow
from sympow.serving.web import contexts, openai
from sympow.serving.web.errors import KINDS, ApiError, error_response
from sympow.serving.web.gatekeeping import Gatekeeper
from sympow.serving.web.metrics import ServerMetrics
from sympow.serving.web.openai import Service

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


class ErrorContent(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorContent


def create_app(service: Service) -> ASGIApp:
    """The application, behind the middleware that checks requests."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.contexts.close()
        service.close()
        await asyncio.to_thread(service.engine.close)

    app = FastAPI(
        title="sympow",
        version=sympow.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    _add_errors(app)
    openai.add_routes(app, service)
    contexts.add_routes(app, service.contexts, [Depends(service.check_open)])
    _add_monitoring(app, service)
    page = _add_page(app)
    return Gatekeeper(app, service.options, service.counts, public=("/health", *page), routes=ROUTES)


def _add_errors(app: FastAPI) -> None:
    """Returns all errors, also those of an unknown path or of a body, in OpenAI's format."""

    async def answer(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405) and not isinstance(error, ApiError):
            message = f"unknown request: {http.method} {http.url.path}"[:300]
            error = ApiError(error.status_code, message, code="unknown_url", headers=dict(error.headers or {}))
        return error_response(error)

    for kind in KINDS:
        app.add_exception_handler(kind, answer)


def _add_monitoring(app: FastAPI, service: Service) -> None:
    registry = CollectorRegistry()
    registry.register(ServerMetrics(service.engine, service.contexts, service.counts))

    # Some probes send HEAD. A route for both methods would have one operation id for both in /openapi.json.
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        alive = not service.stopping and service.engine.alive
        status = "ok" if alive else "stopping" if service.stopping else "failed"
        return JSONResponse({"status": status}, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics(http: HttpRequest) -> Response:
        encode, kind = choose_encoder(http.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})


def _add_page(app: FastAPI) -> list[str]:
    """Serves the files of the page; returns their paths."""
    paths = []
    for file in resources.files("sympow.serving.web").joinpath("page").iterdir():
        kind = PAGE_TYPES.get(PurePath(file.name).suffix)
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            response = Response(file.read_bytes(), media_type=kind, headers=PAGE_HEADERS)
            app.router.routes.append(Route(path, response, methods=["GET"], include_in_schema=False))
            paths.append(path)
    return paths
