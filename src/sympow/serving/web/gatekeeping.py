"""Checks before a request reaches a route: API key, host, origin, and the size of the body.

They are an ASGI middleware rather than FastAPI dependencies, since they must run before the body is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv6Address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sympow.checks import check_at_least, check_finite
from sympow.errors import ArgumentError
from sympow.serving.web.errors import ApiError, disconnected, error_response

# Seconds without data after which a request body is given up.
BODY_PATIENCE = 30.0
# Bytes beyond the limit that are read and dropped, so that the client receives the response: if a connection is closed
# while data arrives, the client may see a connection error instead.
DRAINED = 2**26
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
# Paths that accept any Host header: health probes send the address of a machine or a container.
HOSTLESS = ("/health",)


@dataclass(frozen=True)
class ServerOptions:
    """Limits of the server.

    Attributes:
        api_keys: API keys, of which a request must send one; empty: no key is needed.
        hosts: names that the Host header may have; None: any. This prevents DNS rebinding, with which a page of another
            site could read responses.
        max_body: the most bytes of a request body.
        max_tokens: the largest max_tokens of a request.
        timeout: seconds that a request may take after its body has arrived.
    """

    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    max_body: int = 2**26
    max_tokens: int = 2**16
    timeout: float = 600.0

    def __post_init__(self) -> None:
        check_at_least("max_body", self.max_body, 1)
        check_at_least("max_tokens", self.max_tokens, 1)
        check_finite("timeout", self.timeout)
        if self.timeout <= 0:
            raise ArgumentError("timeout", f"must be above 0, got {self.timeout}")


@dataclass
class HttpCounts:
    """Counts of responses by route and status, of open requests, and of requests whose clients disconnected."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    open: int = 0
    disconnected: int = 0


class Gatekeeper:
    """Refuses requests, and counts all responses.

    Args:
        app: the application, which gets the requests that pass.
        options: which keys and hosts it lets in, and how long a body.
        counts: counts responses.
        public: paths that need no key.
        routes: paths with a counter of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        counts: HttpCounts,
        *,
        public: Collection[str],
        routes: Collection[str],
    ) -> None:
        self._app, self._options, self._counts, self._public, self._routes = app, options, counts, public, routes
        self._digests = [_digest(key.encode()) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # "lifespan" is the start and the shutdown of the application. There are no websockets here.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        route = next((known for known in self._routes if path == known or path.startswith(f"{known}/")), "other")

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.responses[route, message["status"]] += 1
            await send(message)

        self._counts.open += 1
        try:
            await self._let_in(scope, receive, counted)
        finally:
            self._counts.open -= 1

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._options.max_body)
        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, body.receive, send)
        else:
            await body.drain()
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        host, known = headers.get("host", ""), self._options.hosts
        if path not in HOSTLESS and known is not None and _without_port(host) not in known:
            message = f"this server does not go by the name {host[:100]!r}; its option --allow-host adds names"
            return ApiError(403, message, "permission_error", code="unknown_host")
        if method not in ("GET", "HEAD", "OPTIONS") and _is_of_another_site(headers, host):
            return ApiError(403, "pages of other sites must not use this server", "permission_error", code="cross_site")
        if self._digests and path not in self._public and not self._has_key(headers):
            return ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                "authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        # All keys are compared, each in constant time, even after a match.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found) and scheme.lower() == "bearer"


class _Body:
    """A request's body while it is received: bounded in bytes, and in the time between two messages."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit = receive, limit
        self._bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            # Only a disconnect can follow; a route may wait for it as long as it runs.
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_PATIENCE):
                message = await self._receive()
        except TimeoutError as error:
            reason = f"the body did not arrive: nothing came for {BODY_PATIENCE:g} seconds"
            raise ApiError(408, reason, code="body_timeout") from error
        self._note(message)
        if message["type"] == "http.disconnect":
            # Nobody reads this; it ends the route, and is counted.
            raise disconnected()
        if self._bytes > self._limit:
            await self.drain()
            reason = f"the body must have at most {self._limit:,} bytes, the limit of this server (--max-body)"
            raise ApiError(413, reason, code="body_too_large", headers={"connection": "close"})
        return message

    async def drain(self) -> None:
        """Reads and drops the rest of the body, within limits."""
        try:
            async with asyncio.timeout(BODY_PATIENCE):
                while not self._complete and self._bytes <= self._limit + DRAINED:
                    self._note(await self._receive())
        except TimeoutError:
            pass

    def _note(self, message: Message) -> None:
        self._bytes += len(message.get("body", b""))
        self._complete = message["type"] == "http.disconnect" or not message.get("more_body", False)


def _is_of_another_site(headers: Headers, host: str) -> bool:
    """Whether a browser sent a request on behalf of a page of another site."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None:
        # Browsers send Sec-Fetch-Site on plain HTTP only to local addresses.
        return origin.partition("://")[2].lower() != host.lower()
    return site == "cross-site"


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _digest(key: bytes) -> bytes:
    """A digest of fixed length, so that comparing it does not reveal the length of a key either."""
    return hashlib.sha256(key).digest()


def read_keys(content: str) -> list[str]:
    """The API keys in a file, one per line; empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: there is no key, or one cannot be sent in a header.
    """
    keys = [line.strip() for line in content.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ArgumentError("api_key_file", "must have at least one key, in a line of its own")
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ArgumentError(
                "api_key_file", f"must have keys of printable ASCII characters without spaces; key {number}"
            )
    return keys


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def allowed_hosts(host: str, more: Sequence[str]) -> frozenset[str] | None:
    """The Host names that a server bound to `host` accepts; None: all, if other machines can reach it.

    Raises:
        ValueError: one of `more`, the names of --allow-host, is no name of a host.
    """
    if not is_local(host) and not more:
        return None
    own = f"[{host}]" if ":" in host else host
    return frozenset((*LOCAL_HOSTS, own.lower(), *map(_host_name, more)))


def _host_name(name: str) -> str:
    """A name as `_without_port` returns it for a Host header."""
    inside = name.removeprefix("[").removesuffix("]")
    try:
        # In its shortest form, as browsers send it.
        return f"[{IPv6Address(inside)}]"
    except AddressValueError:
        if HOST_NAME.fullmatch(name):
            return name.lower()
    raise ArgumentError(
        "allow_host",
        f"must be a name such as models.example, or an address, without scheme, port and path; got {name!r}",
    )
