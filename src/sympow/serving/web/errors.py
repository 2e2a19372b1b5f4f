"""`ApiError`: an error response in the format of OpenAI's API. `api_error` makes one of any exception."""

from __future__ import annotations

import re
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from sympow.errors import ArgumentError, UserError
from sympow.serving.engine.completion import RequestError
from sympow.serving.engine.scheduler import EngineClosedError, QueueFullError

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "timeout", "server_error"
]
# OpenAI's clients retry requests by themselves after some statuses, unless this header forbids it.
NO_RETRY = {"x-should-retry": "false"}

# What `api_error` knows, to be registered as FastAPI asks for it.
KINDS = (
    *(HTTPException, RequestValidationError, ValidationError, UserError),
    *(QueueFullError, EngineClosedError, RequestError, Exception),
)

# Status of a request whose client has gone away, for the metrics.
DISCONNECTED = 499


class ApiError(HTTPException):
    """Ends a request with an error.

    It is an HTTPException, which FastAPI lets through where a body is received: `gatekeeping` raises errors there.

    Args:
        status: HTTP status.
        message: explanation for the person who sent the request.
        kind: the field `type` of the error, for people: OpenAI's clients choose exceptions by the status.
        param: the field of the request that is wrong.
        code: name of the error, for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: ErrorType = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # A client's number may have thousands of digits.
        message = re.sub(r"([\d,.]{30})[\d,.]{10,}", r"\1…", message)
        super().__init__(status, message, headers)
        self.kind, self.param, self.code = kind, param, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. An argument that the library has refused was a field of the request."""
    match error:
        case ApiError():
            return error
        case RequestValidationError() | ValidationError():
            return _invalid(error)
        case HTTPException(__cause__=ValueError() | RecursionError() as reason):
            # What FastAPI makes of bytes that cannot be decoded. Behind a semicolon is advice to programmers.
            return not_json(str(reason).partition(";")[0])
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case QueueFullError():
            return queue_full(f"the server is busy: {error}")
        case EngineClosedError():
            return stopping()
        case RequestError():
            return failed(str(error))
        case UserError():
            return ApiError(400, str(error), param=argument_of(error))
        case _:
            # The server prints the traceback; the client gets no details.
            return ApiError(500, "the server failed on this request", "server_error")


def error_response(error: Exception) -> JSONResponse:
    told = api_error(error)
    return JSONResponse(told.body(), status_code=told.status_code, headers=told.headers)


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def stopping() -> ApiError:
    message = "the server is stopping"
    return ApiError(503, message, "server_error", code="stopping", headers={"retry-after": "5"})


def disconnected() -> ApiError:
    return ApiError(DISCONNECTED, "the client disconnected")


def failed(message: str) -> ApiError:
    """A 500 response for a request that failed in the model or the tokenizer, and would fail again."""
    return ApiError(500, message, "server_error", code="request_failed", headers=NO_RETRY)


def _invalid(error: RequestValidationError | ValidationError) -> ApiError:
    """A 400 response that names the first error in a body."""
    first = error.errors()[0]
    # FastAPI names the body, and pydantic members of unions, neither of which are fields.
    whole = first["loc"][1:] if isinstance(error, RequestValidationError) else first["loc"]
    place = [part for part in whole if isinstance(part, int) or part.islower()]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        # The client chose this name, which may have any characters and length.
        where, param = ".".join(map(str, whole))[:100], str(whole[0])[:100]
        return ApiError(400, f"Unrecognized request argument supplied: {where}", param=param, code="unknown_parameter")
    if first["type"] == "json_invalid":
        # FastAPI has the place beside the message, and pydantic inside it.
        return not_json(" at character ".join((first["ctx"]["error"], *map(str, whole))))
    if first["type"] == "missing" and not place:
        return not_json("it is empty")
    if isinstance(getattr(error, "body", None), bytes):
        return not_sent_as_json()
    if first["type"] == "model_attributes_type":
        message = "Input should be an object"
    if not place:
        # Of the whole body, by a validator.
        return ApiError(400, message, param=argument_of(first.get("ctx", {}).get("error")))
    where = ".".join(map(str, place))
    return ApiError(400, f"{where}: {message}", param=str(place[0]))


def not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not JSON: {reason}", code="not_json")


def not_sent_as_json() -> ApiError:
    return ApiError(400, "the body must be JSON: send it with `Content-Type: application/json`", code="not_json")


def argument_of(error: object) -> str | None:
    return error.name if isinstance(error, ArgumentError) else None
