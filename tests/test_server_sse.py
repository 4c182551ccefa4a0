# SPDX-License-Identifier: Apache-2.0
"""Streams of events: errors before and behind the beginning, waiting, and clients that go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from nemo_build.runtime.server import sse
from nemo_build.runtime.server.errors import ApiError
from nemo_build.runtime.server.limits import Gate
from nemo_build.runtime.server.record import Record
from nemo_build.runtime.server.sse import ClientGone, EventStream


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(sse, "_PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(sse, "_QUIET_SECONDS", 0.02)


class Connection:
    """What an answer is sent to; its client goes when it is told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.status: int | None = None
        self.body = b""
        self.record = Record()
        self.scope = {"type": "http", "state": {"record": self.record}}

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    async def answer(self, events: AsyncGenerator[bytes, None]) -> None:
        stream = await EventStream(events).begin(self.receive)
        await stream(self.scope, self.receive, self.send)


async def events(*steps: float | bytes | Exception, closed: list[bool]) -> AsyncGenerator[bytes, None]:
    """Sleeps, events and an error, in this order."""
    try:
        for step in steps:
            if isinstance(step, bytes):
                yield step
            elif isinstance(step, Exception):
                raise step
            else:
                await asyncio.sleep(step)
    finally:
        closed.append(True)


def test_an_error_before_the_beginning_has_a_status():
    async def main() -> None:
        connection, closed = Connection(), []
        with pytest.raises(ApiError, match="no"):
            await connection.answer(events(ApiError(400, "no"), closed=closed))
        assert connection.status is None
        assert closed

    asyncio.run(main())


def test_an_error_behind_it_is_the_last_event():
    async def main() -> None:
        connection, closed = Connection(), []
        await connection.answer(events(b"data: 1\n\n", ApiError(429, "no", code="x"), closed=closed))
        assert connection.status == 200
        first, last, nothing = connection.body.split(b"\n\n")
        assert (first, nothing) == (b"data: 1", b"")
        assert b'"code": "x"' in last
        assert connection.record.error == "x"

    asyncio.run(main())


@pytest.mark.parametrize("steps", [(0.1,), (b"data: 1\n\n",)], ids=["before", "behind"])
def test_an_answer_may_have_an_event_of_its_own_for_an_error(steps):
    async def main() -> None:
        connection, closed = Connection(), []
        failing = events(*steps, ApiError(429, "no", code="x"), closed=closed)
        stream = EventStream(failing, lambda error: b"event: failed\ndata: %b\n\n" % error.message.encode())
        await (await stream.begin(connection.receive))(connection.scope, connection.receive, connection.send)
        assert connection.status == 200
        assert connection.body.endswith(b"event: failed\ndata: no\n\n")
        assert connection.record.error == "x"

    asyncio.run(main())


def test_who_waits_is_told():
    async def main() -> None:
        connection, closed = Connection(), []
        await connection.answer(events(0.2, b"data: 1\n\n", closed=closed))
        waiting, _, rest = connection.body.rpartition(b": waiting\n\n")
        assert rest == b"data: 1\n\n"
        assert set(waiting.split(b"\n\n")) <= {b": waiting", b""}
        late = Connection()
        await late.answer(events(0.1, ApiError(400, "no"), closed=closed))
        assert late.status == 200
        assert b'"message": "no"' in late.body

    asyncio.run(main())


@pytest.mark.parametrize("steps", [(100.0,), (b"data: 1\n\n", 100.0)], ids=["before", "behind"])
def test_a_client_that_goes_closes_the_generator(monkeypatch, steps):
    monkeypatch.setattr(sse, "_PATIENCE_SECONDS", 50.0)

    async def main() -> None:
        connection, closed = Connection(), []
        answer = asyncio.create_task(connection.answer(events(*steps, closed=closed)))
        await asyncio.sleep(0.05)
        assert not closed
        connection.gone.set()
        if isinstance(steps[0], bytes):
            await answer
            assert connection.record.client_aborted
        else:
            with pytest.raises(ClientGone):
                await answer
        assert closed

    asyncio.run(main())


@pytest.mark.parametrize("steps", [(100.0,), (b"data: 1\n\n", 100.0)], ids=["before", "behind"])
def test_time_that_is_up_is_told(steps):
    async def main() -> None:
        gate, connection, closed = Gate(1), Connection(), []

        async def admitted() -> AsyncGenerator[bytes, None]:
            with gate.admit(1):
                async for event in events(*steps, closed=closed):
                    yield event

        answer = asyncio.create_task(connection.answer(admitted()))
        await asyncio.sleep(0.1)
        assert gate.active == 1
        with pytest.raises(ApiError):
            gate.check(1)
        await gate.drain(0)
        await answer
        assert gate.active == 0
        assert b"shutting down" in connection.body
        with pytest.raises(ApiError, match="shutting down"):
            gate.check(1)

    asyncio.run(main())
