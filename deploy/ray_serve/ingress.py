# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of the replicas.

``POST /generate`` takes a JSON object with ``prompt`` (text or token ids) and, if wanted, ``stream``, ``salt``,
``priority``, ``timeout`` and any field of :class:`~nemo_build.runtime.SamplingParams`. The answer is one JSON object,
or with ``stream`` an event (``data: {...}``) for each token. The status is 400 for an invalid request, 503 where the
same request may well succeed later. A stream's status is sent with its first token; what goes wrong after it is the
last event, an ``error``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import fields
from typing import Any

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nemo_build.deploy.ray_serve.affinity import is_prompt
from nemo_build.deploy.ray_serve.generation import Generation, LostError, gather
from nemo_build.deploy.ray_serve.replica import Message
from nemo_build.errors import RequestError, UserError
from nemo_build.runtime import SamplingParams

PATH = "/generate"

MOST_BYTES = 16 << 20
"""Bytes of a request: a million tokens of text are about 5 MB."""

_PARAMS = {f.name for f in fields(SamplingParams)}
_SCHEDULING = ("priority", "timeout")
_KINDS = {"stream": bool, "salt": str | None}
_BUSY = (LostError, BackPressureError, DeploymentUnavailableError)


class Ingress:
    """What Ray Serve sends HTTP requests to.

    Args:
        replicas: The replicas of :class:`~.replica.EngineReplica`.
        attempts: Replicas that are tried for a request.
    """

    def __init__(self, replicas: DeploymentHandle[Any], attempts: int) -> None:
        self._call = replicas.options(stream=True, method_name="stream").remote
        self._attempts = attempts

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        if request.url.path.rstrip("/") != PATH or request.method != "POST":
            return _error(404, f"There is only POST {PATH}.")
        try:
            generation, streams = parse(await _body(request))
            messages = generation.stream(self._call, self._attempts)
            if not streams:
                return JSONResponse(await gather(messages))
            first = await anext(messages)
        except RequestError as error:
            return _error(400, str(error))
        except _BUSY as error:
            return _error(503, str(error))
        return StreamingResponse(_events(first, messages), media_type="text/event-stream")


def parse(body: bytes) -> tuple[Generation, bool]:
    """A request, and whether it is to be streamed.

    Args:
        body: What the client sent.

    Raises:
        RequestError: What is wrong with its form; values are checked by the engine.
    """
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The request is no JSON: {error}") from error
    if not isinstance(given, Mapping) or "prompt" not in given:
        raise RequestError("The request is no JSON object with a prompt.")
    problems = [
        f"{name} has the wrong type"
        for name, kind in _KINDS.items()
        if name in given and not isinstance(given[name], kind)
    ]
    if not is_prompt(given["prompt"]):
        problems.append("prompt is neither a text nor a list of token ids")
    unknown = sorted(set(given) - _PARAMS - {"prompt", *_KINDS, *_SCHEDULING})
    problems += [f"unknown name: {name}" for name in unknown]
    if problems:
        raise RequestError("The request cannot be answered:", problems)
    generation = Generation(
        given["prompt"],
        {name: given[name] for name in _PARAMS if name in given},
        given.get("salt"),
        {name: given[name] for name in _SCHEDULING if name in given},
    )
    return generation, given.get("stream", False)


async def _body(request: Request) -> bytes:
    """The request's body. Raises RequestError if it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise RequestError(f"The request has more than {MOST_BYTES >> 20} MB.")
    return bytes(body)


async def _events(first: Message, messages: AsyncIterator[Message]) -> AsyncIterator[str]:
    """Server-sent events."""
    yield _event(first)
    try:
        async with aclosing(messages) as rest:  # type: ignore[type-var]
            async for message in rest:
                yield _event(message)
    except UserError as error:
        yield _event({"error": str(error)})


def _event(message: Message) -> str:
    return f"data: {json.dumps(message)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
