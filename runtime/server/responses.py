# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses``: OpenAI's newer interface. Nothing is stored."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pydantic
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from nemo_build.runtime.chat import Delta
from nemo_build.runtime.server.answers import Answers, Choice, logprobs_content
from nemo_build.runtime.server.asking import check_model, log_unknown, span_of
from nemo_build.runtime.server.chat import Conversation, asked_of, prepare
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, JsonResponse
from nemo_build.runtime.server.generation import Asked
from nemo_build.runtime.server.record import Record
from nemo_build.runtime.server.response_input import messages_of
from nemo_build.runtime.server.response_logprobs import ContentLogprobs
from nemo_build.runtime.server.response_output import Event, Items
from nemo_build.runtime.server.schemas.chat import ChatRequest
from nemo_build.runtime.server.schemas.responses import ResponsesRequest
from nemo_build.runtime.server.sse import EventStream, until_gone
from nemo_build.runtime.server.strict import StrictRoute

__all__ = ["routes"]

_NOT_STORED = ("previous_response_id", "conversation", "background")


def routes(server: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])

    @router.post("/v1/responses", summary="Answer a conversation, in items")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        log_unknown(body)
        check_model(body.model, server.names)
        server.gate.check(1)
        record: Record = request.state.record
        record.span = span_of("chat", body, request, server)
        conversation, asked = await asyncio.to_thread(_prepare, body, server)
        response = _Response(body, conversation, asked, server, record)
        if body.stream:
            return await EventStream(response.events(), response.failure).begin(request.receive)
        return JsonResponse(await until_gone(request.receive, response.whole()))

    return router


def _prepare(body: ResponsesRequest, server: ServerContext) -> tuple[Conversation, list[Asked]]:
    chat = _chat(body)
    conversation = prepare(chat, server)
    return conversation, asked_of(chat, conversation, server)


def _chat(body: ResponsesRequest) -> ChatRequest:
    """The same as a chat request. Raises ApiError if it cannot be."""
    for name in _NOT_STORED:
        if getattr(body, name):
            message = f"{name} is not supported: this server stores nothing."
            raise ApiError(400, message, param=name, code="unsupported_value")
    if body.n is not None and body.n != 1:
        raise ApiError(400, "A response has one answer.", param="n", code="unsupported_value")
    messages = messages_of(body.input, body.instructions)
    try:
        return body.chat(messages)
    except pydantic.ValidationError as error:
        errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]
        raise RequestValidationError(errors) from error


class _Response:
    """A response, while it is generated."""

    def __init__(
        self,
        body: ResponsesRequest,
        conversation: Conversation,
        asked: list[Asked],
        server: ServerContext,
        record: Record,
    ) -> None:
        self._id = f"resp_{secrets.token_hex(12)}"
        self._told = None if asked[0].params.logprobs is None else ContentLogprobs()
        choice = Choice(0, conversation.parser(), self._told)
        self._answers = Answers(server, record, self._id, asked, [choice])
        self._choice, self._tokenizer = choice, server.backend.tokenizer
        self._items = Items()
        self._number = 0
        self._body = {
            **_echo(body, conversation),
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": server.name,
        }

    async def whole(self) -> dict[str, Any]:
        """Everything at once, when it is done."""
        async with aclosing(self._answers.steps()) as steps:
            async for _, _, deltas in steps:
                for _ in self._taken(deltas):
                    pass
        for _ in self._finished():
            pass
        return self._state(self._status)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As server-sent events."""
        async with aclosing(self._answers.steps()) as steps:
            async for _, _, deltas in steps:
                found = self._begin()
                found += [self._event(*event) for event in self._taken(deltas)]
                if found:
                    yield b"".join(found)
        last = [self._event(*event) for event in self._finished()]
        last.append(self._event(f"response.{self._status}", {"response": self._state(self._status)}))
        yield b"".join(last)

    def failure(self, error: ApiError) -> bytes:
        """The events that end a response which an error has ended."""
        told = {"code": "server_error", "message": error.message}
        failed = {"response": self._state("failed") | {"error": told}}
        return b"".join([*self._begin(), self._event("response.failed", failed)])

    def _begin(self) -> list[bytes]:
        """The events that come before all others."""
        if self._number:
            return []
        state = {"response": self._state("in_progress")}
        return [self._event(f"response.{kind}", state) for kind in ("created", "in_progress")]

    def _taken(self, deltas: Sequence[Delta]) -> Iterator[Event]:
        parts = [] if self._told is None else self._told.parts
        return self._items.take(deltas, [logprobs_content(found, self._tokenizer) for found in parts])

    def _finished(self) -> Iterator[Event]:
        return self._items.finish(complete=self._is_complete and not self._choice.is_call_cut)

    @property
    def _is_complete(self) -> bool:
        return self._choice.finish != "length"

    @property
    def _status(self) -> str:
        return "completed" if self._is_complete else "incomplete"

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def _state(self, status: str) -> dict[str, Any]:
        """The response as it is now."""
        over = status in ("completed", "incomplete")
        usage = self._answers.usage
        return {
            **self._body,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items.output if over else [],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }
            if over
            else None,
        }


def _echo(body: ResponsesRequest, conversation: Conversation) -> dict[str, Any]:
    """What a response repeats of its request."""
    params = conversation.params
    choice = body.tool_choice or "auto"
    reasoning = body.reasoning
    form = body.text.format if body.text is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [{"strict": None, **t.model_dump(exclude_none=True)} for t in body.tools or ()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
