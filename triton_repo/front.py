# SPDX-License-Identifier: Apache-2.0
"""The front of a server: requests of clients on one side, the engine on the other, and a thread that steps it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.output import Chunk, take
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request, Scheduling
from nemo_build.triton_repo.arrays import Tensors

_NAMES = {
    "min_length": "min_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
    "end_id": "stop_token_ids",
}
"""What inputs are called that are parameters of sampling under another name."""

_PARAMETERS = {f.name for f in fields(SamplingParams)}

_ONLY = {
    "num_return_sequences": 1,
    "beam_width": 1,
    "return_log_probs": False,
    "bad_words": "",
    "guided_decoding_guide": "",
    "guided_decoding_guide_type": "",
}
"""Inputs that may be sent, but only with the value that changes nothing."""


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


@dataclass(frozen=True)
class Asked:
    """What a client asks for.

    Attributes:
        text: The prompt.
        params: How tokens are chosen.
        scheduling: Priority and timeout.
        streams: Whether each piece of text is to be sent as it comes.
        echoes: Whether the prompt is to be part of the text.
    """

    text: str
    params: SamplingParams
    scheduling: Scheduling
    streams: bool
    echoes: bool


def parse(inputs: Tensors, defaults: SamplingParams) -> Asked:
    """A client's inputs.

    Args:
        inputs: By name.
        defaults: Parameters for what it does not say.

    Raises:
        RequestError: What is wrong with them; all problems are named.
    """
    values = {name: _value(array) for name, array in inputs.items()}
    problems = [
        f"{name} is {values[name]!r}; this server knows only {only!r}"
        for name, only in _ONLY.items()
        if name in values and values[name] not in (only, [only], [])
    ]
    chosen = {n: getattr(defaults, n) for n in _PARAMETERS}
    chosen |= _from_json(values.get("sampling_parameters", ""), problems)
    for name, value in values.items():
        parameter = _NAMES.get(name, name)
        if parameter in _PARAMETERS:
            chosen[parameter] = _as_list(value) if parameter in ("stop", "stop_token_ids") else value
    if problems:
        raise RequestError("The request cannot be answered:", problems)
    chosen["min_tokens"] = min(chosen["min_tokens"], chosen["max_tokens"])
    return Asked(
        values["text_input"],
        SamplingParams(**chosen),
        Scheduling(priority=values.get("priority", 0), timeout=values.get("timeout")),
        bool(values.get("stream", values.get("streaming", False))),
        not values.get("exclude_input_in_output", True),
    )


class Front:
    """Serves an engine.

    Args:
        connect: Waits for whatever the engine needs, and returns it. It is called in the thread that steps, when
            there is a first request: before that, a model of Triton must not use others.
        most_waiting: Requests that may wait; further ones are refused.
        observe: Called with the engine after each step, in the thread that made it.
    """

    def __init__(
        self,
        connect: Callable[[], Engine],
        *,
        most_waiting: int = 256,
        observe: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self._connect, self._observe = connect, observe
        self._most_waiting = most_waiting
        self._inbox: list[tuple[Tensors, Responder]] = []
        self._work = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, inputs: Tensors, responder: Responder) -> None:
        """Take a client's request; everything else happens in the thread."""
        with self._work:
            if self._closed:
                responder.fail("the server is going down", busy=True)
                return
            self._inbox.append((inputs, responder))
            self._work.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Answer what was asked so far, then stop."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def _drive(self) -> None:
        try:
            engine = self._connect()
        except Exception as error:  # whoever asks is told
            self._refuse_all(str(error))
            return
        live: dict[Request, _Answer] = {}
        while True:
            with self._work:
                self._work.wait_for(lambda: self._inbox or self._closed or live)
                if self._closed and not (self._inbox or live):
                    return
                inbox, self._inbox = self._inbox, []
            for inputs, responder in inbox:
                self._accept(engine, live, inputs, responder)
            for request, answer in live.items():
                if answer.responder.cancelled():
                    engine.cancel([request])
            try:
                engine.step()
            except Exception as error:  # it has ended the requests that ran, whose readers are told
                if not any(r.error is error for r in live):
                    for request in live:
                        request.error = request.error or error
            self._observe(engine)
            for request in [r for r, answer in live.items() if answer.deliver(r)]:
                del live[request]

    def _accept(
        self, engine: Engine, live: dict[Request, _Answer], inputs: Tensors, responder: Responder
    ) -> None:
        waiting = engine.statistics().waiting
        if waiting >= self._most_waiting:
            responder.fail(f"{waiting} requests wait already", busy=True)
            return
        try:
            asked = parse(inputs, engine.default_params)
            [request] = engine.requests(asked.text, asked.params, asked.scheduling)
        except UserError as error:
            responder.fail(str(error))
            return
        live[request] = _Answer(responder, asked)
        engine.add([request])

    def _refuse_all(self, message: str) -> None:
        """Refuse what comes, for as long as the server has this model."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._inbox or self._closed)
                inbox, self._inbox = self._inbox, []
                closed = self._closed
            for _, responder in inbox:
                responder.fail(message)
            if closed:
                return


class _Answer:
    """A request's way back to its client."""

    def __init__(self, responder: Responder, asked: Asked) -> None:
        self.responder, self._streams = responder, asked.streams
        self._chunks: list[Chunk] = []
        self._text = asked.text if asked.echoes else ""
        self._is_first = True

    def deliver(self, request: Request) -> bool:
        """Send what is new; returns whether that was all."""
        try:
            self._chunks += take(request, 0)
        except UserError as error:
            self.responder.fail(str(error))
            return True
        if self._chunks and (self._streams or request.finished):
            self._send(request)
        return request.finished

    def _send(self, request: Request) -> None:
        chunks, self._chunks = self._chunks, []
        text = self._text + "".join(c.text for c in chunks)
        tokens = [c for c in chunks if c.token_id is not None]
        outputs: dict[str, NDArray[Any]] = {
            "text_output": _strings(text),
            "finish_reason": _strings(chunks[-1].finish_reason or ""),
            "num_input_tokens": _int32(request.prompt_tokens if self._is_first else 0),
            "num_output_tokens": _int32(len(tokens)),
            "total_accepted_draft_tokens": _int32(sum(c.drafted for c in tokens)),
        }
        self._text, self._is_first = "", False
        self.responder.send(outputs, final=request.finished)


def _value(array: NDArray[Any]) -> Any:
    """An input as Python has it: a value, or a list of several."""
    values = array.ravel().tolist()
    values = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values]
    return values[0] if len(values) == 1 else values


def _as_list(value: Any) -> list[Any]:
    """Stop words or ids; empty ones are how some clients say that there are none."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if v not in ("", -1)]


def _from_json(text: Any, problems: list[str]) -> dict[str, Any]:
    """Sampling parameters as one JSON object, which is how clients of vLLM's model send them."""
    if not text:
        return {}
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"sampling_parameters is no JSON: {error}")
        return {}
    if not isinstance(given, Mapping):
        problems.append("sampling_parameters is not a JSON object")
        return {}
    unknown = sorted(set(given) - _PARAMETERS)
    if unknown:
        problems.append(f"sampling_parameters has unknown names: {', '.join(map(repr, unknown))}")
    values = {n: _number(v) for n, v in given.items() if n in _PARAMETERS}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    return values


def _number(value: Any) -> Any:
    """A number that was sent as a string, as some clients do."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _strings(text: str) -> NDArray[np.object_]:
    return np.array([text.encode()], np.object_)


def _int32(value: int) -> NDArray[np.int32]:
    return np.array([value], np.int32)
