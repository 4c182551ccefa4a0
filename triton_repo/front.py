# SPDX-License-Identifier: Apache-2.0
"""The front of a server: requests of clients on one side, the engine on the other.

Three threads: one reads requests and makes tokens of prompts, so that a long one holds up nobody; one steps the engine;
one answers (:mod:`~nemo_build.triton_repo.delivery`). Requests with a grammar, which has to be compiled, are got ready
beside the others. Whatever goes wrong with a request, its client is told, and the threads go on.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.output import take
from nemo_build.runtime.request import Request
from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.asked import Asked, parse, wants_report
from nemo_build.triton_repo.delivery import Answer, Delivery, Responder, refuse
from nemo_build.triton_repo.responses import Responses, report

_COMPILERS = 2
"""Requests with a grammar that are got ready at a time."""

_STUCK = 60.0
"""Seconds of a step after which a full queue is not a busy server any more, but one that does not work."""


class Front:
    """Serves an engine.

    Args:
        connect: Waits for whatever the engine needs, and returns it. It is called when there is a first request:
            before that, a model of Triton must not use others. If it fails, it is called again with the next one.
        most_waiting: Requests that may wait; further ones are refused.
        observe: Called with the engine now and then, in one thread.
        speculator: Where the engine's drafts come from, for those who ask; ``None``: there are none.
    """

    def __init__(
        self,
        connect: Callable[[], Engine],
        *,
        most_waiting: int = 256,
        observe: Callable[[Engine], None] = lambda _: None,
        speculator: str | None = None,
    ) -> None:
        self._connect, self._observe = connect, observe
        self._most_waiting, self._speculator = most_waiting, speculator
        self._engine: Engine | None = None
        self._delivery: Delivery | None = None
        self._most_bytes = 0
        self._inbox: deque[tuple[Tensors, Responder]] = deque()
        self._compiling = ThreadPoolExecutor(_COMPILERS, "grammar")
        self._num_compiling = 0
        self._accepted: dict[Request, Answer] = {}  # what the thread that steps has not seen yet
        self._work = threading.Condition()
        self._closed = False
        self._stepping_since: float | None = None
        self._reader = threading.Thread(target=self._read, name="reader", daemon=True)
        self._stepper = threading.Thread(target=self._drive, name="engine", daemon=True)

    def submit(self, inputs: Tensors, responder: Responder) -> None:
        """Take a client's request, or refuse it; everything else happens in the threads."""
        with self._work:
            refusal = self._refusal(inputs)
            if refusal is None:
                self._inbox.append((inputs, responder))
                self._work.notify_all()
                if not self._reader.ident:
                    self._reader.start()
        if refusal is not None:
            message, busy = refusal
            refuse(responder, message, busy=busy, fault=not busy)

    def close(self) -> None:
        """Answer what was asked so far, then stop."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        for thread in (self._reader, self._stepper):
            if thread.ident:
                thread.join()
        if self._delivery is not None:
            self._delivery.close()

    def _refusal(self, inputs: Tensors) -> tuple[str, bool] | None:
        """Why a request is not taken, and whether that may pass."""
        if self._closed:
            return "the server is going down", True
        if wants_report(inputs):  # it takes no place
            return None
        waiting = len(self._inbox) + self._num_compiling
        waiting += self._engine.statistics().waiting if self._engine else 0
        if waiting < self._most_waiting:
            return None
        if self._engine is None:
            return f"{waiting} requests wait for the engine to open", False
        since = self._stepping_since
        if since is not None and time.monotonic() - since > _STUCK:
            return f"a step has not ended for {time.monotonic() - since:.0f} seconds", False
        return f"{waiting} requests wait already", True

    # --- reading ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._inbox or self._closed)
                if not self._inbox:
                    break
                inputs, responder = self._inbox.popleft()
            engine = self._engine or self._open(responder)
            if engine is not None:
                self._accept(engine, inputs, responder)
        self._compiling.shutdown()

    def _open(self, responder: Responder) -> Engine | None:
        """Open the engine; if that fails, everybody who has asked so far is told."""
        try:
            engine = self._connect()
            longest = engine.tokenizer.longest_token
        except Exception as error:
            traceback.print_exc()
            with self._work:
                others, self._inbox = self._inbox, deque()
            for one in (responder, *(r for _, r in others)):
                refuse(one, f"The engine cannot be opened: {error}", fault=True)
            return None
        self._most_bytes = engine.session.context * longest
        self._delivery = Delivery(lambda: self._observe(engine))
        self._engine = engine
        self._stepper.start()
        return engine

    def _accept(self, engine: Engine, inputs: Tensors, responder: Responder) -> None:
        with _telling(responder):
            if wants_report(inputs):
                responder.send(report(engine, self._speculator), final=True)
                return
            asked = parse(inputs, engine.default_params)
            if asked.params.grammar is None:
                self._admit(engine, asked, responder)
                return
            with self._work:
                self._num_compiling += 1
            self._compiling.submit(self._compile, engine, asked, responder)

    def _compile(self, engine: Engine, asked: Asked, responder: Responder) -> None:
        try:
            with _telling(responder):
                self._admit(engine, asked, responder)
        finally:
            with self._work:
                self._num_compiling -= 1

    def _admit(self, engine: Engine, asked: Asked, responder: Responder) -> None:
        request = self._request(engine, asked)
        echo = _text(engine, asked) if asked.echoes else ""
        engine.add([request])
        answer = Answer(responder, Responses(asked, request, echo), streams=asked.streams)
        with self._work:
            self._accepted[request] = answer
            self._work.notify_all()

    def _request(self, engine: Engine, asked: Asked) -> Request:
        """What is asked for, checked."""
        if isinstance(asked.prompt, str):
            size = len(asked.prompt.encode())
            if size > self._most_bytes:
                raise RequestError(
                    f"The prompt has {size} bytes, more than {engine.session.context} tokens, the engine's context, "
                    "can have."
                )
        [request] = engine.requests([asked.prompt], asked.params, asked.scheduling, asked.skips_special)
        return request

    # --- stepping --------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        engine, delivery = self._engine, self._delivery
        assert engine is not None, "the thread is started with one"
        assert delivery is not None, "likewise"
        live: dict[Request, Answer] = {}
        while True:
            if not live:
                with self._work:
                    self._work.wait_for(lambda: self._accepted or self._closed)
                if self._closed:
                    self._reader.join()  # it accepts what still waits in the inbox
            with self._work:
                accepted, self._accepted = self._accepted, {}
            delivery.open(accepted.values())
            live |= accepted
            if not live:
                return
            self._step(engine, live)
            self._deliver(delivery, live)

    def _step(self, engine: Engine, live: Mapping[Request, Answer]) -> None:
        """One step, whatever comes of it."""
        try:
            engine.cancel([r for r, answer in live.items() if answer.gone])
            self._stepping_since = time.monotonic()
            engine.step()
        except Exception as error:
            traceback.print_exc()
            # If it was a step, it has ended the requests that ran with this error; else nobody knows.
            if not any(r.error is error for r in live):
                engine.cancel(list(live))
                for request in live:
                    request.error = request.error or error
        finally:
            self._stepping_since = None

    def _deliver(self, delivery: Delivery, live: dict[Request, Answer]) -> None:
        """Hand over what is new, and forget whose answer is whole."""
        ready, whole = [], []
        for request, answer in live.items():
            finished = request.finished
            try:
                if answer.add(list(take(request, 0)), finished=finished):
                    ready.append(answer)
            except UserError as error:
                answer.fail(error)
                ready.append(answer)
            if finished:
                whole.append(request)
        delivery.send(ready)
        for request in whole:
            del live[request]


@contextmanager
def _telling(responder: Responder) -> Iterator[None]:
    """Whatever goes wrong, the client is told."""
    try:
        yield
    except UserError as error:
        refuse(responder, str(error), fault=not isinstance(error, RequestError))
    except Exception as error:
        traceback.print_exc()
        refuse(responder, f"{type(error).__name__}: {error}", fault=True)


def _text(engine: Engine, asked: Asked) -> str:
    """The prompt as a text."""
    if isinstance(asked.prompt, str):
        return asked.prompt
    return engine.tokenizer.decode(asked.prompt, skip_special_tokens=asked.skips_special)
