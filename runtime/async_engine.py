# SPDX-License-Identifier: Apache-2.0
"""The asyncio front: requests from coroutines, steps in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from nemo_build.runtime.engine import Engine, Prompt
from nemo_build.runtime.output import Chunk, Completion, completion, take
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request, Scheduling

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """An engine for the coroutines of one event loop.

    A thread steps the engine as long as there are requests, so the loop never waits for a step. ::

        async with AsyncEngine(Engine.load("engine", max_sequences=16)) as engine:
            async for chunk in engine.stream("The list type"):
                print(chunk.text, end="")

    Args:
        engine: The engine; its own :meth:`~nemo_build.runtime.engine.Engine.generate` may be used at the same time.

    Attributes:
        engine: As given.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ready: dict[Request, asyncio.Event] = {}
        self._work = threading.Condition()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.engine.listen(self._notify)
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all requests of this front, wait for the step under way, and stop the thread."""
        self.engine.cancel(list(self._ready))
        with self._work:
            self._closed = True
            self._work.notify()
        try:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join)
        finally:
            self.engine.unlisten(self._notify)
            self._wake_readers()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        scheduling: Scheduling | None = None,
        skip_special_tokens: bool = True,
    ) -> Completion:
        """Complete a prompt; arguments and errors are those of :meth:`Engine.generate`. Cancelling the task ends it."""
        [request] = self.engine.requests(_one(prompt), params, scheduling, skip_special_tokens)
        return completion(request, [chunk async for chunk in self.run(request)])

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        scheduling: Scheduling | None = None,
        skip_special_tokens: bool = True,
    ) -> AsyncIterator[Chunk]:
        """Like :meth:`generate`, but yields every token as it comes. Closing the iterator ends the request."""
        [request] = self.engine.requests(_one(prompt), params, scheduling, skip_special_tokens)
        run = self.run(request)
        try:
            async for chunk in run:
                yield chunk
        finally:
            await run.aclose()

    async def run(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """What comes of a request of :meth:`Engine.requests`, as it comes. Closing the generator ends the request."""
        if self._loop is not asyncio.get_running_loop() or self._closed:
            raise RuntimeError("the engine belongs to another event loop, or is closed")
        ready = self._ready[request] = asyncio.Event()
        self.engine.add([request])
        self._start_work()
        try:
            while True:
                for chunk in take(request, 0):
                    yield chunk
                if request.finished and not request.events:
                    return
                await ready.wait()
                ready.clear()
        finally:
            del self._ready[request]
            self.engine.cancel([request])
            self._start_work()

    def _start_work(self) -> None:
        with self._work:
            self._work.notify()

    def _drive(self) -> None:
        """Step while there is something to do, until closed and all requests of this front have ended."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or self.engine.unfinished)
                if self._closed and all(r.finished for r in list(self._ready)):
                    return
            try:
                self.engine.step()
            except Exception:
                # The scheduler has ended what ran with this error, and its readers raise it.
                continue

    def _notify(self) -> None:
        """A step is over; called in the thread that made it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so nobody reads any more
                self._loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        for request, ready in self._ready.items():
            if request.events or request.finished:
                ready.set()


def _one(prompt: Prompt) -> Sequence[Prompt]:
    """A prompt as a list of one."""
    return [prompt]
