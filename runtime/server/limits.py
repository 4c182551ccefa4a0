# SPDX-License-Identifier: Apache-2.0
"""What stands before every route: keys, origins, sizes, room, and the end of the server."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_build.runtime.server.errors import ApiError, as_api_error, busy, unavailable
from nemo_build.runtime.server.logs import request_id, take_request_id
from nemo_build.runtime.server.record import Record

__all__ = ["OPEN_PATHS", "Edge", "Gate"]

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Probes have no keys; nor has the page, which asks for one."""

_PAGE = ("/", "/page/")

_BODY_SECONDS = 60.0
"""A body that takes longer to come is given up."""

_END_SECONDS = 5.0
"""For so long clients may take to hear that time is up."""

_NO_ROUTE = "(none)"
"""The route of what is asked for at a path that there is not."""


class Gate:
    """How much may be generated at a time, and whether anything new may.

    Args:
        most: Answers that may run and wait together.

    Attributes:
        active: Answers that run and wait.
        draining: Nothing new is let in.
        closed: What ran longer than the server waits has been ended.
    """

    def __init__(self, most: int) -> None:
        self.active = 0
        self.draining = self.closed = False
        self._most = most
        self._tasks: set[asyncio.Task[object]] = set()

    def check(self, answers: int) -> None:
        """Raise ApiError if there is no room for some answers, or never can be, or nothing new may come."""
        if self.draining:
            raise unavailable("The server is shutting down.")
        if answers > self._most:
            message = f"This server takes {self._most} answers at a time; the request asks for {answers}."
            raise ApiError(400, message, param="n", code="invalid_value")
        if self.active + answers > self._most:
            raise busy()

    @contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Have room for some answers while the block runs. It runs in the task that is cancelled when time is up.

        Raises:
            ApiError: As :meth:`check`; or time was up.
        """
        self.check(answers)
        task = asyncio.current_task()
        assert task is not None, "it is called in coroutines"
        self.active += answers
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.closed:
                raise
            task.uncancel()
            raise unavailable("The server is shutting down; it had no time left for this answer.") from None
        finally:
            self.active -= answers
            self._tasks.discard(task)

    async def drain(self, seconds: float) -> None:
        """Let nothing in, and wait for what runs; end what is not done after so many seconds."""
        self.draining = True
        end = asyncio.get_running_loop().time() + seconds
        while self._tasks and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        end += _END_SECONDS
        while self._tasks and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)


class Edge:
    """Checks keys, origins and sizes, gives every request an id, and writes a line about it.

    It is a plain ASGI application around another.

    Args:
        app: The application.
        keys: Keys of which a request must have one; none: it needs none.
        origins: Web pages that may call although they are not of this machine, where `is_local`; ``*``: any.
        is_local: The server listens on the loopback address only. Without keys, pages of other hosts are refused
            then: to a browser, a name that leads to that address makes them pages of the server itself.
        most_bytes: Of a body.
        count_error: Told the status of every answer that is an error.
        paths: Gives the paths that there are.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        origins: Collection[str],
        is_local: bool,
        most_bytes: int,
        count_error: Callable[[int], None],
        paths: Callable[[], Collection[str]],
    ) -> None:
        self._app, self._count_error, self._paths = app, count_error, paths
        self._keys = [key.encode() for key in keys]
        self._most_bytes, self._origins = most_bytes, frozenset(origins)
        self._checks_origins = is_local and not keys and "*" not in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = take_request_id(headers.get("x-request-id"))
        token = request_id.set(identity)
        record = scope.setdefault("state", {})["record"] = Record()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = identity
                record.status = message["status"]
            await send(message)

        try:
            await self._serve(scope, headers, receive, send_with_id)
        finally:
            record.close(self._route(scope), self._count_error)
            request_id.reset(token)

    def _route(self, scope: Scope) -> str:
        """The path as the server declares it. What was refused here has not been routed."""
        found = getattr(scope.get("route"), "path", None)
        if found is None and scope["path"] in self._paths():
            found = scope["path"]
        return found or _NO_ROUTE

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check_origin(headers)
            self._check_key(scope, headers)
            body = await self._body(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
        except ApiError as error:
            scope["state"]["record"].error = error.code
            await error.response()(scope, receive, send)
            return
        try:
            await self._app(scope, _replay(body, receive), send)
        except Exception as error:
            record: Record = scope["state"]["record"]
            told = as_api_error(error)
            record.error = told.code
            if record.status:  # an answer that has begun can only be cut off
                raise
            await told.response()(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if not self._checks_origins or origin is None or origin in self._origins or _is_local(origin):
            return
        message = (
            f"Web pages of {origin[:200]!r} may not call this server, which has no keys and is for this machine. "
            "`--cors-origin` names those that may."
        )
        raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path: str = scope["path"]
        if not self._keys or path in OPEN_PATHS or path == _PAGE[0] or path.startswith(_PAGE[1]):
            return
        if scope["method"] == "OPTIONS":
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token:
            message = "There is no API key: send one as `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="missing_api_key", headers={"WWW-Authenticate": "Bearer"})
        given = token.strip().encode("latin-1")  # the bytes as they came
        # All are compared, so that the time does not tell which is near.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            message = "The API key is not one of this server."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._most_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "The body ended too early.")
                    parts.append(message.get("body", b""))
                    size, more = size + len(parts[-1]), message.get("more_body", False)
                    if size > self._most_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {_BODY_SECONDS:.0f} seconds.") from None
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"The body is larger than {self._most_bytes} bytes, which is all this server takes."
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _is_local(origin: str) -> bool:
    """Whether an origin is a page of this machine. Names of others may lead here, so only its own count."""
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, as if it came now."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
