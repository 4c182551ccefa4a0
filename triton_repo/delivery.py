# SPDX-License-Identifier: Apache-2.0
"""Answers on their way to clients.

To send a response, to ask whether a client has gone, and to set a gauge is a message to the server's process and back
each, so a thread of its own does it, beside the steps. If it falls behind, what has come meanwhile goes as one.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime.output import Chunk
from nemo_build.triton_repo import BUSY, FAULT
from nemo_build.triton_repo.arrays import Tensors

_LOOK = 0.05
"""Seconds between looks at who has gone, and at what the gauges are to show."""

_LONGEST_MESSAGE = 2000
"""Characters of an error; what a client sent may be part of it."""


class Responder(Protocol):
    """Answers one client's request."""

    def send(self, outputs: Tensors, *, final: bool) -> None:
        """One response; the last one is `final`."""
        ...

    def fail(self, message: str, *, busy: bool = False) -> None:
        """The last response, an error; `busy` if the same request may well be answered later."""
        ...

    def cancelled(self) -> bool:
        """Whether the client has gone."""
        ...


class Answer:
    """A request's way back to its client.

    Args:
        responder: Answers it; it is asked nothing after its last response.
        make: Makes a response of what is new.
        streams: Whether each piece is to be sent as it comes.

    Attributes:
        gone: Whether nobody is there any more to be answered.
        over: Whether its last response was sent.
    """

    def __init__(
        self, responder: Responder, make: Callable[[Sequence[Chunk]], Tensors], *, streams: bool
    ) -> None:
        self.gone = self.over = False
        self._responder, self._make, self._streams = responder, make, streams
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._finished = False
        self._error: UserError | None = None

    def add(self, chunks: Sequence[Chunk], *, finished: bool) -> bool:
        """Add what is new; returns whether there is something to send."""
        with self._lock:
            self._chunks += chunks
            self._finished = finished
            return bool(self._chunks) and (self._streams or finished)

    def fail(self, error: UserError) -> None:
        """End it with an error."""
        self._error = error

    def send(self) -> None:
        """Send what there is."""
        if self.over:
            return
        if self._error is not None:
            self.over = True
            refuse(self._responder, str(self._error), fault=not isinstance(self._error, RequestError))
            return
        with self._lock:
            chunks, self._chunks = self._chunks, []
            self.over = self._finished
        if chunks:
            self._responder.send(self._make(chunks), final=self.over)

    def look(self) -> None:
        """See whether the client is still there. To ask the server after the last response would end the server."""
        if not (self.over or self.gone):
            self.gone = self._responder.cancelled()


class Delivery:
    """The thread that answers.

    Args:
        observe: Called now and then, when there was something to do.
    """

    def __init__(self, observe: Callable[[], None]) -> None:
        self._observe = observe
        self._work = threading.Condition()
        self._opened: list[Answer] = []
        self._ready: dict[Answer, None] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def open(self, answers: Iterable[Answer]) -> None:
        """Look after answers, until the last piece of each is sent."""
        with self._work:
            self._opened += answers
            self._work.notify()

    def send(self, answers: Iterable[Answer]) -> None:
        """Have answers sent what they have."""
        with self._work:
            self._ready |= dict.fromkeys(answers)
            self._work.notify()

    def close(self) -> None:
        """Send what there is to send, and end."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        looked, is_news = time.monotonic(), True
        watched: list[Answer] = []
        while True:
            wait = _LOOK if watched or is_news else None
            with self._work:
                self._work.wait_for(lambda: self._ready or self._opened or self._closed, wait)
                ready, self._ready = self._ready, {}
                opened, self._opened = self._opened, []
                if self._closed and not ready:
                    break
            is_news = is_news or bool(ready or opened)
            for answer in ready:
                self._guarded(answer.send, answer)
            watched = [answer for answer in (*watched, *opened) if not answer.over]
            if time.monotonic() - looked >= _LOOK:
                for answer in watched:
                    self._guarded(answer.look, answer)
                self._guarded(self._observe)
                looked, is_news = time.monotonic(), bool(ready)
        self._guarded(self._observe)

    def _guarded(self, work: Callable[[], None], answer: Answer | None = None) -> None:
        """Whatever goes wrong with one is no matter of the others; who cannot be sent to has gone."""
        try:
            work()
        except Exception:
            traceback.print_exc()
            if answer is not None:
                answer.gone = answer.over = True


def refuse(responder: Responder, message: str, *, busy: bool = False, fault: bool = False) -> None:
    """Tell a client that it gets no answer, if it can be told.

    Args:
        responder: Tells it.
        message: Why.
        busy: The same request may well be answered later.
        fault: It is not the request that is wrong.
    """
    message = f"{BUSY if busy else FAULT if fault else ''}{message}"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]} ..."
    try:
        responder.fail(message, busy=busy)
    except Exception:
        traceback.print_exc()
