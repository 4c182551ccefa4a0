# SPDX-License-Identifier: Apache-2.0
"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_build.runtime.server.schemas.common import MOST_ITEMS, MOST_TOOLS, Body, Items, Sampling, ShortText

__all__ = ["ChatRequest", "FunctionTool", "Message", "Messages", "NamedChoice", "Tools"]

_Objects = Annotated[Items[dict[str, Any]], Field(max_length=MOST_TOOLS)]


class Message(Body):
    """A message. What is in it is checked by the template, which tells all problems at once."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _Objects | None = None
    name: ShortText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: _Objects | None = None
    tool_call_id: ShortText | None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


Messages = Annotated[Items[Message], Field(min_length=1, max_length=MOST_ITEMS)]
"""A conversation."""

Tools = Annotated[Items[FunctionTool], Field(max_length=MOST_TOOLS)]
"""The tools of a request."""


class FunctionName(Body):
    """Which function."""

    name: ShortText


class NamedChoice(Body):
    """``tool_choice`` that names a function."""

    type: Literal["function"]
    function: FunctionName


class Reasoning(Body):
    """``reasoning``, as some clients say it."""

    effort: ShortText | None = None
    enabled: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


class CustomParams(Body):
    """``custom_params``, SGLang's word."""

    thinking_budget: Annotated[int, Field(ge=0)] | None = None


class Nvext(Body):
    """``nvext``, NIM's word."""

    max_thinking_tokens: Annotated[int, Field(ge=0)] | None = None


class ChatRequest(Sampling):
    """The body of a chat request."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ShortText | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    custom_params: CustomParams | None = None
    nvext: Nvext | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
