# SPDX-License-Identifier: Apache-2.0
"""``/v1/chat/completions``: from a conversation to what is generated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nemo_build.errors import RequestError
from nemo_build.runtime.chat import AnswerParser, opens_thinking, template_variables
from nemo_build.runtime.constraints.json_schema import parse_json
from nemo_build.runtime.params import Grammar, SamplingParams, Thinking
from nemo_build.runtime.server.answers import ChatAnswer, Choice
from nemo_build.runtime.server.asking import (
    check_model,
    encode,
    fit,
    log_unknown,
    output_grammar,
    own_variables,
    rendered,
    sampling_params,
    scheduling_of,
    span_of,
)
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, JsonResponse, as_api_error
from nemo_build.runtime.server.generation import Asked, seed_of
from nemo_build.runtime.server.schemas.chat import ChatRequest, NamedChoice
from nemo_build.runtime.server.sse import EventStream, until_gone
from nemo_build.runtime.server.strict import StrictRoute

__all__ = ["Conversation", "asked_of", "prepare", "routes"]


@dataclass(frozen=True)
class Conversation:
    """A conversation that is to be answered.

    Attributes:
        prompt: Token ids, up to where the assistant answers.
        params: Of the first answer.
        thinking: Whether the prompt has opened the thinking.
        tools: The tools that calls are looked for, in OpenAI's form; none: there are no calls.
        tool_choice: ``auto``, ``none``, ``required``, or the name of a function.
        parallel: Whether there may be several calls.
        force_content: Thinking that nothing follows becomes the content.
    """

    prompt: Sequence[int]
    params: SamplingParams
    thinking: bool
    tools: Sequence[dict[str, Any]]
    tool_choice: str
    parallel: bool
    force_content: bool

    def parser(self) -> AnswerParser:
        """Takes an answer apart."""
        return AnswerParser(
            thinking=self.thinking,
            tools=self.tools or None,
            tool_choice=self.tool_choice,
            parallel=self.parallel,
            force_nonempty_content=self.force_content,
        )


def routes(server: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        log_unknown(body)
        check_model(body.model, server.names)
        answers = body.n or 1
        server.gate.check(answers)
        request.state.record.span = span_of("chat", body, request, server)
        conversation, asked = await asyncio.to_thread(_ask, body, server)
        answer = ChatAnswer(
            server,
            request.state.record,
            asked,
            [Choice(i, conversation.parser()) for i in range(len(asked))],
            include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
            show_tokens=body.nemo is not None and body.nemo.tokens is True,
        )
        if body.stream:
            return await EventStream(answer.events()).begin(request.receive)
        return JsonResponse(await until_gone(request.receive, answer.whole()))

    return router


def _ask(body: ChatRequest, server: ServerContext) -> tuple[Conversation, list[Asked]]:
    conversation = prepare(body, server)
    return conversation, asked_of(body, conversation, server)


def asked_of(body: ChatRequest, conversation: Conversation, server: ServerContext) -> list[Asked]:
    """What is to be generated: as many answers as are wanted, each with a seed of its own."""
    scheduling = scheduling_of(body, server.timeout)
    seeds = [seed_of(conversation.params.seed, i) for i in range(body.n or 1)]
    return [Asked(conversation.prompt, replace(conversation.params, seed=seed), scheduling) for seed in seeds]


def prepare(body: ChatRequest, server: ServerContext) -> Conversation:
    """The prompt of a request, and how to go on from there.

    Raises:
        ApiError: The request is invalid, or does not fit the context.
    """
    tools, choice = _tools(body)
    variables = _variables(body, server)
    text = rendered(server, body, tools, variables)
    prompt = encode(server, text, "messages")
    thinking = opens_thinking(text)
    most = fit(server.backend.context, len(prompt), "messages")
    wanted = body.max_completion_tokens or body.max_tokens or most
    params = sampling_params(
        body, server.backend.default_params, max_tokens=min(wanted, most), logprobs=_logprobs(body)
    )
    grammar = _grammar(body, tools, choice)
    budget = _budget(body)
    if grammar is not None:
        params = replace(params, grammar=replace(grammar, after_thinking=thinking))
    if thinking and budget is not None:
        names = [tool["function"]["name"] for tool in tools]
        params = replace(params, thinking=Thinking.with_grace(budget, names))
    return Conversation(
        prompt,
        params,
        thinking,
        tools,
        choice,
        body.parallel_tool_calls is not False,
        variables.get("force_nonempty_content") is True,
    )


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value"
        )
    return (body.top_logprobs or 0) if body.logprobs else None


def _variables(body: ChatRequest, server: ServerContext) -> dict[str, Any]:
    """What the template is told besides messages and tools."""
    reasoning = body.reasoning
    effort = body.reasoning_effort or (reasoning.effort if reasoning else None)
    enable = body.enable_thinking
    if enable is None and reasoning is not None:
        enable = reasoning.enabled
    try:
        return template_variables(
            server.backend.template,
            enable_thinking=enable,
            reasoning_effort=effort,
            chat_template_kwargs=own_variables(body.chat_template_kwargs),
        )
    except RequestError as error:
        raise as_api_error(error, "reasoning_effort") from error


def _budget(body: ChatRequest) -> int | None:
    """Most tokens of thinking, by whatever name; ``None``: as many as there is room for."""
    in_template = (body.chat_template_kwargs or {}).get("thinking_budget")
    if in_template is not None and not (type(in_template) is int and in_template >= 0):
        raise ApiError(
            400,
            "chat_template_kwargs.thinking_budget must be an integer of at least 0.",
            param="chat_template_kwargs.thinking_budget",
            code="invalid_value",
        )
    given = (
        body.thinking_token_budget,
        body.thinking_budget,
        body.custom_params.thinking_budget if body.custom_params else None,
        body.nvext.max_thinking_tokens if body.nvext else None,
        in_template,
        body.reasoning.max_tokens if body.reasoning else None,
    )
    return next((budget for budget in given if budget is not None), None)


def _tools(body: ChatRequest) -> tuple[list[dict[str, Any]], str]:
    """The tools that may be called, and which must be. Raises ApiError if they make no sense.

    With ``none`` the model is not told of tools either: it would call them all the same, in what is then text.
    """
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    names = [tool["function"]["name"] for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ApiError(400, f"Two tools are called {twice[0]!r}.", param="tools", code="invalid_value")
    for i, tool in enumerate(tools):
        _check_parameters(tool["function"].get("parameters"), f"tools[{i}].function.parameters")
    if isinstance(body.tool_choice, NamedChoice):
        named = body.tool_choice.function.name
        if named not in names:
            message = f"tool_choice names the function {named[:64]!r}, which is none of the tools."
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return tools, named
    choice: str = body.tool_choice or "auto"
    if choice == "required" and not tools:
        message = "tool_choice is required, but there are no tools."
        raise ApiError(400, message, param="tool_choice", code="invalid_value")
    return [] if choice == "none" else tools, choice


def _check_parameters(schema: dict[str, Any] | None, where: str) -> None:
    if schema is None:
        return
    kind, properties = schema.get("type", "object"), schema.get("properties", {})
    required = schema.get("required", [])
    problem = None
    if kind != "object":
        problem = f"{where}.type must be 'object'"
    elif not isinstance(properties, dict):
        problem = f"{where}.properties must be an object"
    elif not all(isinstance(value, dict | bool) for value in properties.values()):
        problem = f"{where}.properties must have schemas as values"
    elif not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        problem = f"{where}.required must be a list of names"
    if problem is not None:
        raise ApiError(400, f"{problem}.", param=where, code="invalid_function_parameters")


def _grammar(body: ChatRequest, tools: Sequence[dict[str, Any]], choice: str) -> Grammar | None:
    """What the answer has to look like, thinking apart."""
    form = output_grammar(body)
    if not tools:
        return form
    parallel = body.parallel_tool_calls is not False
    given: dict[str, Any] = {"tools": tools, "choice": choice, "parallel": parallel}
    if choice == "auto" and form is not None:
        if form.kind not in _JSON_KINDS:
            message = "Beside tools that may be called, an answer can only have the form of JSON."
            raise ApiError(400, message, param="response_format", code="invalid_value")
        given["content"] = {"type": "object"} if form.kind == "json_object" else _schema(form.text)
    elif choice == "auto" and not any(tool["function"].get("strict") for tool in tools):
        return None
    try:
        return Grammar("tools", json.dumps(given))
    except RecursionError:
        message = "The tools, or the form of the answer beside them, are nested too deeply."
        raise ApiError(400, message, param="tools", code="invalid_value") from None


def _schema(text: str) -> Any:
    """A schema, which clients may give as text."""
    try:
        return parse_json(text, "The schema")
    except RequestError as error:
        raise as_api_error(error, "response_format") from error


_JSON_KINDS = ("json_object", "json_schema")
