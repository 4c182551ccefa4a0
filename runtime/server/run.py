# SPDX-License-Identifier: Apache-2.0
"""The server's process: from opening the port to the end of the last answer."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from nemo_build.errors import UserError
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError
from nemo_build.runtime.server.health import Readiness

__all__ = ["Server", "listen", "url_of"]

_log = logging.getLogger(__name__)

_BACKLOG = 2048
"""Connections that wait to be taken."""

_RETRY_SECONDS = 1.0
"""Between tries to get a first token."""

_LAST_WORDS_SECONDS = 0.2
"""For requests on connections that were taken before the port was closed."""

_LINGER_SECONDS = 5
"""For so long connections may take to close after the last answer."""


def listen(host: str, port: int) -> socket.socket:
    """An open port, so that a port that is taken is found before an engine is loaded.

    Raises:
        UserError: It cannot be opened.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        hint = "Choose another with --host and --port."
        raise UserError(f"Cannot listen at {host}:{port}: {error.strerror}.", hint=hint) from error
    found.listen(_BACKLOG)
    return found


def url_of(listening: socket.socket) -> str:
    """Where browsers find a server that listens there."""
    host, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application, and ends it gently.

    The first SIGTERM or SIGINT: nothing new is taken, with status 503, and what runs has some time to end; then its
    clients are told so. A second signal ends all at once.

    Args:
        app: Of :func:`~nemo_build.runtime.server.app.create_app`.
        drain_seconds: How long what runs may take to end.
        ready: Called once, when the engine has generated a token.
    """

    def __init__(
        self, app: FastAPI, *, drain_seconds: float = 30.0, ready: Callable[[], object] = bool
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LINGER_SECONDS,
            )
        )
        self._context: ServerContext = app.state.server
        self._readiness: Readiness = app.state.readiness
        self._drain_seconds, self._ready = drain_seconds, ready
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._tasks.append(self._loop.create_task(self._warm_up()))

    async def _warm_up(self) -> None:
        while not self._context.gate.draining:
            try:
                await self._readiness.check()
            except ApiError:  # which has been logged
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._ready()
                return

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self.stop()

    def stop(self) -> None:
        """End gently; called again, at once. From any thread."""
        if self._loop is None or self._context.gate.draining:
            self.should_exit = self.force_exit = True
            return
        self._context.gate.draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        _log.info(
            "shutting down: %d answers run, which have %g seconds to end",
            self._context.gate.active,
            self._drain_seconds,
        )
        self._tasks.append(asyncio.get_running_loop().create_task(self._drain()))

    async def _drain(self) -> None:
        await self._context.gate.drain(self._drain_seconds)
        for server in self.servers:
            server.close()
        # Whoever was let in before is told, and not just cut off.
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        self.should_exit = True
