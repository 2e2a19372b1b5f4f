"""Runs an application with uvicorn until a signal, and then shuts down gracefully."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from sympow.errors import ArgumentError
from sympow.serving.web.openai import Service

# Seconds after the grace period for clients to read the rest of their responses.
LAST_GRACE = 10.0


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0: a free port.

    Raises:
        ValueError: the address is not this machine's, or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_failure:
            made = on_failure.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            on_failure.pop_all()
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError("host", f"and port cannot be used: {host}:{port}: {reason}") from error
    return made


def url_of(bound: socket.socket) -> str:
    """The URL for clients on this machine."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class StoppableServer(uvicorn.Server):
    """On SIGINT or SIGTERM, refuses new requests and lets running ones end.

    A second signal ends running requests too, with an error.

    Args:
        app: the application.
        service: the service whose requests are refused and ended.
        grace: seconds that running requests get to end before they are ended with an error.
        ready: called when clients can connect.
        stopping: called on the first signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        *,
        grace: float,
        ready: Callable[[], None],
        stopping: Callable[[], None],
    ) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            # Nothing here depends on the client address that a reverse proxy forwards.
            proxy_headers=False,
            timeout_graceful_shutdown=int(grace + LAST_GRACE),
            lifespan="on",
            ws="none",
        )
        super().__init__(config)
        self._service, self._grace, self._ready, self._on_stop = service, grace, ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Also ends the server when its engine has failed, so that a supervisor can restart it."""
        return await super().on_tick(counter) or not self._service.engine.alive

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # As uvicorn's, but it does not note the signal, which would be raised again at the end: the exit code is 0.
        asyncio.get_running_loop().call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self.should_exit:
            self._service.fail_running()
            return
        self.should_exit = True
        self._on_stop()
        self._service.stop()
        asyncio.get_running_loop().call_later(self._grace, self._service.fail_running)
