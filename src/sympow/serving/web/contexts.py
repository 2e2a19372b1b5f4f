"""The routes below /v1/contexts: texts that are prefilled once, sent as JSON or uploaded as a file."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from typing import Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile

from sympow.data.plain_text import decode
from sympow.serving.web.bodies import StrictModel
from sympow.serving.web.errors import ApiError, not_sent_as_json
from sympow.serving.web.openai import Service

# Encodings of an uploaded form, as its header may name them.
UTF8 = (b"utf-8", b"utf8")
# Parts of an uploaded form: the file, and the context's name.
FORM_LIMITS: dict[str, Any] = {"max_files": 1, "max_fields": 8, "max_part_size": 2**16}


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


def add_routes(app: FastAPI, service: Service) -> None:
    contexts, while_open = service.contexts, [Depends(service.check_open)]

    @app.post("/v1/contexts", openapi_extra=EITHER_BODY, dependencies=while_open)
    async def create(http: HttpRequest) -> dict[str, Any]:
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            body = await _uploaded(http)
        elif kind == "application/json":
            body = ContextBody.model_validate_json(await http.body())
        else:
            raise not_sent_as_json()
        return (await contexts.create(body.text, body.name)).body()

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

    @app.post("/v1/contexts/{id_}/fork", dependencies=while_open)
    async def fork(id_: str, body: ForkBody) -> dict[str, Any]:
        return (await contexts.fork(id_, body.text, body.name)).body()


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
