# SPDX-License-Identifier: Apache-2.0
"""A server for tests of the chat page: it speaks as the real one does, and says what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_build.runtime.server.page import page_routes

Event = dict[str, Any]
INFO = {
    "model": "fake",
    "context": 4096,
    "speculators": ["mtp", "ngram"],
    "speculator": "mtp",
    "sampling": {"temperature": 1.0, "top_p": 0.95, "max_tokens": 256},
}


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of `app` on a free port, for as long as the context lasts."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server does not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def tokens(text: str, drafted: bool, **delta: Any) -> Event:
    """A chunk of one token."""
    return {
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        "nemo": {
            "tokens": [{"text": text, "drafted": drafted}],
            "speculator": "mtp",
            "acceptance_length": 2.5,
        },
    }


def content(*texts: str) -> list[Event]:
    """Chunks of an answer, a token each; every other one was a draft."""
    return [tokens(text, i % 2 == 1, content=text) for i, text in enumerate(texts)]


def thought(*texts: str) -> list[Event]:
    """Chunks of reasoning and its end."""
    spoken = [tokens(text, True, reasoning_content=text, reasoning=text) for text in texts]
    return [*spoken, tokens("</think>", False)]


def end(reason: str = "stop") -> list[Event]:
    """The chunks that end an answer: why, and what it took."""
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    return [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": usage},
    ]


class FakeServer:
    """Answers with `script(body)`: events, or a status and an error.

    Attributes:
        address: Where it is.
        bodies: The requests so far.
        running: How many answers are being sent: what a slot would be.
        key: The API key it wants, if it wants one.
        pause: Seconds between events.
        piece: Bytes that it sends at a time; 0: an event.
        script: As above.
    """

    def __init__(self) -> None:
        self.address = ""
        self.running = 0
        self.reset()
        routes = [
            *page_routes(),
            Route("/nemo/info", self.info),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    def reset(self) -> None:
        """Forget what was asked, and what was to be said."""
        self.bodies: list[Event] = []
        self.key: str | None = None
        self.pause = 0.0
        self.piece = 0
        self.script: Callable[[Event], list[Event] | tuple[int, str]] = lambda body: [*content("yes"), *end()]

    @contextmanager
    def serving(self) -> Iterator[FakeServer]:
        """Be there for as long as the context lasts."""
        with serving(self.app) as self.address:
            yield self

    def refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "The API key is wrong."}}, 401)

    async def info(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse(INFO)

    async def chat(self, request: Request) -> Response:
        if refusal := self.refused(request):
            return refusal
        self.bodies.append(await request.json())
        script = self.script(self.bodies[-1])
        if isinstance(script, tuple):
            return JSONResponse({"error": {"message": script[1], "param": "top_p"}}, script[0])
        return StreamingResponse(self.events(script), media_type="text/event-stream")

    async def events(self, script: list[Event]) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            for event in script:
                data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
                size = self.piece or len(data)
                for i in range(0, len(data), size):
                    yield data[i : i + size]
                    await asyncio.sleep(self.pause)
            if "error" not in script[-1]:
                yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1
