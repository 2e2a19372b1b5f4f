"""`ApiError`: an error response in the format that OpenAI's clients expect."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "timeout", "server_error"
]
# OpenAI's clients retry requests by themselves after some statuses, unless this header forbids it.
NO_RETRY = {"x-should-retry": "false"}

# Status of a request whose client has gone away, for the metrics.
DISCONNECTED = 499


class ApiError(Exception):
    """Ends a request with an error.

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
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def from_argument_error(error: Exception, fields: Collection[str]) -> ApiError:
    """A 400 response from a ValueError or TypeError of the library, whose message begins with an argument's name.

    Args:
        fields: fields of the request; the error's param is that name if it is one of them, else None.
    """
    message = str(error)
    first = re.match(r"\w*", message)
    name = first[0] if first else ""
    return ApiError(400, message, param=name if name in fields else None)


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def stopping() -> ApiError:
    message = "the server is stopping"
    return ApiError(503, message, "server_error", code="stopping", headers={"retry-after": "5"})


def timed_out(seconds: float) -> ApiError:
    message = f"the request took longer than {seconds:g} seconds, this server's limit; ask for fewer tokens"
    return ApiError(504, message, "timeout", code="timeout", headers=NO_RETRY)


def disconnected() -> ApiError:
    return ApiError(DISCONNECTED, "the client disconnected")


def failed(message: str) -> ApiError:
    """A 500 response for a request that failed in the model or the tokenizer, and would fail again."""
    return ApiError(500, message, "server_error", code="request_failed", headers=NO_RETRY)
