# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses``: OpenAI's newer interface. Nothing is stored."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pydantic
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from nemo_build.runtime.server.answers import Answers, Choice, logprobs_content, shown_logprobs
from nemo_build.runtime.server.asking import check_model, log_unknown, span_of
from nemo_build.runtime.server.chat import Conversation, asked_of, prepare
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, JsonResponse, as_api_error
from nemo_build.runtime.server.record import Record
from nemo_build.runtime.server.response_input import messages_of
from nemo_build.runtime.server.response_output import Items
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
        chat = _chat(body)
        conversation = await asyncio.to_thread(prepare, chat, server)
        response = _Response(body, chat, conversation, server, record)
        if body.stream:
            return await EventStream(response.events()).begin(request.receive)
        return JsonResponse(await until_gone(request.receive, response.whole()))

    return router


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
        chat: ChatRequest,
        conversation: Conversation,
        server: ServerContext,
        record: Record,
    ) -> None:
        self._id = f"resp_{secrets.token_hex(12)}"
        asked, choice = asked_of(chat, conversation, server), Choice(0, conversation.parser())
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
            async for _, pieces, deltas in steps:
                told = logprobs_content(shown_logprobs(pieces), self._tokenizer)
                for _ in self._items.take(deltas, told):
                    pass
        for _ in self._items.finish(complete=self._is_complete):
            pass
        return self._state(self._status)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As server-sent events."""
        steps = self._answers.steps()
        begun = False
        try:
            async with aclosing(steps):
                async for _, pieces, deltas in steps:
                    told = logprobs_content(shown_logprobs(pieces), self._tokenizer)
                    found = []
                    if not begun:
                        begun, state = True, {"response": self._state("in_progress")}
                        found = [
                            self._event(f"response.{kind}", state) for kind in ("created", "in_progress")
                        ]
                    found += [self._event(*event) for event in self._items.take(deltas, told)]
                    if found:
                        yield b"".join(found)
        except Exception as error:
            if not begun:
                raise
            told_error = as_api_error(error)
            failed = self._state("failed") | {
                "error": {"code": "server_error", "message": told_error.message}
            }
            yield self._event("response.failed", {"response": failed})
            return
        last = [self._event(*event) for event in self._items.finish(complete=self._is_complete)]
        last.append(self._event(f"response.{self._status}", {"response": self._state(self._status)}))
        yield b"".join(last)

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
