# SPDX-License-Identifier: Apache-2.0
"""Clients of the server that cost little themselves: they look at bytes, and parse nothing that they need not.

As a script it reads a job as JSON from its standard input, ``{"do": "streams" | "load", …}`` with the arguments of the
function of that name, and prints the result as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
MESSAGES = [{"role": "user", "content": "Which functions does the module os have?"}]


def request(body: dict[str, Any]) -> bytes:
    """A chat request as HTTP, on a connection of its own."""
    data = json.dumps({"messages": MESSAGES, "stream": True, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def streams(port: int, count: int, tokens: int) -> dict[str, float]:
    """So many streams at a time, of so many tokens each.

    Returns:
        ``seconds`` from the first request to the end of the last answer, and ``chunks``, of all together.
    """
    wanted = request({"max_tokens": tokens, "ignore_eos": True, "temperature": 0})
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    start = time.perf_counter()
    for connection in connections:
        connection.sendall(wanted)
        selector.register(connection, selectors.EVENT_READ)
    chunks, left, last = 0, count, dict.fromkeys(connections, b"")
    while left:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            chunks += data.count(b"data: {")
            if data:
                last[connection] = (last[connection] + data)[-64:]
                continue
            assert DONE in last[connection], last[connection]
            selector.unregister(connection)
            connection.close()
            left -= 1
    return {"seconds": time.perf_counter() - start, "chunks": chunks}


@dataclass
class _Found:
    """What clients saw."""

    complete: int = 0
    left: int = 0
    chunks: int = 0
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def _client(port: int, number: int, end: float, leaving: float, tokens: int, found: _Found) -> None:
    chance = random.Random(number)
    while time.monotonic() < end:
        body = {"max_tokens": chance.randint(tokens // 4, tokens), "ignore_eos": True, "seed": number}
        leaves_after = chance.randint(0, body["max_tokens"]) if chance.random() < leaving else None
        try:
            await _ask(port, body, leaves_after, found)
        except (OSError, AssertionError) as error:
            found.errors.append(f"{type(error).__name__}: {error}"[:300])


async def _ask(port: int, body: dict[str, Any], leaves_after: int | None, found: _Found) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chunks, tail = 0, b""
    try:
        writer.write(request(body))
        start = last = time.perf_counter()
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(500)
        while data := await reader.read(1 << 16):
            now = time.perf_counter()
            count = data.count(b'"delta":{"')
            if count:
                (found.gaps if chunks else found.firsts).append(now - (last if chunks else start))
                last = now
            chunks += count
            tail = (tail + data)[-200:]
            if leaves_after is not None and chunks > leaves_after:
                found.left += 1
                return
        assert DONE in tail, tail
        found.complete += 1
    finally:
        writer.close()
        found.chunks += chunks


def load(port: int, clients: int, seconds: float, leaving: float, tokens: int) -> dict[str, Any]:
    """So many clients that ask again and again, of which some leave in the middle of an answer.

    Args:
        port: The server's, on loopback.
        clients: How many at a time.
        seconds: For how long they ask.
        leaving: Share of the requests whose client leaves.
        tokens: Most of an answer.

    Returns:
        ``complete`` and ``left`` requests, ``errors``, ``chunks``, and percentiles in milliseconds of the time between
        arrivals (``gap``) and until the first (``first``).
    """
    found = _Found()

    async def main() -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(_client(port, i, end, leaving, tokens, found) for i in range(clients)))

    asyncio.run(main())
    return {
        "complete": found.complete,
        "left": found.left,
        "errors": found.errors[:10],
        "error_count": len(found.errors),
        "chunks": found.chunks,
        "gap_ms": _percentiles(found.gaps),
        "first_ms": _percentiles(found.firsts),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(int(len(ordered) * q), len(ordered) - 1)] * 1e3 for name, q in at.items()}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    print(json.dumps({"streams": streams, "load": load}[job.pop("do")](**job)))
