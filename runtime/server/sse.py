# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nemo_build.runtime.server.errors import ApiError, as_api_error, unavailable
from nemo_build.runtime.server.record import Record

__all__ = ["DONE", "ClientGone", "EventStream", "until_gone"]

DONE = b"data: [DONE]\n\n"

_QUIET_SECONDS = 15.0
"""After so long without a first event a comment is sent, so that nobody between takes the connection for dead."""

_PATIENCE_SECONDS = 2.0
"""For so long the status waits for the first event: an error that comes earlier has a status of its own."""

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def until_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do some work, unless the client goes away, which cancels it.

    Args:
        receive: Of the request, whose body has been read.
        work: What to do.

    Raises:
        ClientGone: It went away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, gone)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for what they do then."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def error_event(error: ApiError) -> bytes:
    """An error behind the beginning of an answer."""
    return b"data: %b\n\n" % json.dumps(error.body()).encode()


class EventStream(Response):
    """An answer in events. The client's going away closes their generator at once.

    The generator runs in one task from beginning to end.

    Args:
        events: Whole events in bytes. An exception becomes an event, and the last one.
        failure: Makes that event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], failure: Callable[[ApiError], bytes] = error_event
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._failure = events, failure
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._send: asyncio.Future[Send] = loop.create_future()
        self._task = loop.create_task(self._run())

    async def begin(self, receive: Receive) -> EventStream:
        """Wait a while for the first event, so that what is wrong with a request is answered with a status.

        Raises:
            ClientGone: The client went away.
            Exception: As the generator.
        """
        try:
            await until_gone(receive, self._first(_PATIENCE_SECONDS))
            if self._task.done():
                self._task.result()
        except BaseException:
            await _cancel(self._task)
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["state"]["record"]
        try:
            await until_gone(receive, self._serve(send, record))
        except ClientGone:
            record.client_aborted = True
        finally:
            await _cancel(self._task)

    async def _first(self, seconds: float) -> bool:
        """Wait for the first event, or the end; whether it came in time."""
        done, _ = await asyncio.wait(
            {self._begun, self._task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    async def _serve(self, send: Send, record: Record) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while not await self._first(_QUIET_SECONDS):
            await send(_body(b": waiting\n\n"))
        if not self._send.done():  # it is if time was up meanwhile
            self._send.set_result(send)
        await asyncio.wait({self._task})
        error = (
            unavailable("The server is shutting down.") if self._task.cancelled() else self._task.exception()
        )
        if error is not None:
            told = as_api_error(error)
            record.error = told.code or "error"
            await send(_body(self._failure(told)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self) -> None:
        send: Send | None = None
        try:
            async for event in self._events:
                if send is None:
                    self._begun.set_result(None)
                    send = await self._send
                await send(_body(event))
        finally:
            await self._events.aclose()


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
