# SPDX-License-Identifier: Apache-2.0
"""The body of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_build.runtime.server.schemas.chat import ChatRequest
from nemo_build.runtime.server.schemas.common import MOST_ITEMS, MOST_TOOLS, Body, Items, Sampling, ShortText

__all__ = ["ResponsesRequest"]


class TextFormat(Body):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Body):
    """``text``."""

    format: TextFormat | None = None


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: ShortText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseChoice(Body):
    """``tool_choice`` that names a function."""

    type: Literal["function"]
    name: ShortText


class ResponseReasoning(Body):
    """``reasoning``."""

    effort: ShortText | None = None
    summary: ShortText | None = None


class ResponsesRequest(Sampling):
    """The body of a request for a response. Nothing is stored, so nothing that is can be referred to."""

    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MOST_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: ResponseReasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[Items[ShortText], Field(max_length=64)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: ShortText | None = None
    conversation: ShortText | dict[str, Any] | None = None
    background: bool | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """The same as a chat request.

        Args:
            messages: The conversation in `input`.

        Raises:
            pydantic.ValidationError: It makes no chat request.
        """
        shared = set(ChatRequest.model_fields) & self.model_fields_set
        shared -= {"tools", "tool_choice", "reasoning", "top_logprobs", "n", "max_tokens"}
        given = self.model_dump(include=shared, exclude_unset=True, by_alias=True)
        given["messages"] = messages
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            given["reasoning_effort"] = self.reasoning.effort
        if self.tools is not None:
            dumped = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            given["tools"] = [{"type": "function", "function": function} for function in dumped]
        if isinstance(self.tool_choice, ResponseChoice):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice
        wanted = self.text.format if self.text is not None else None
        if wanted is not None:
            given["response_format"] = _response_format(wanted)
        return ChatRequest.model_validate(given)


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {
        "type": "json_schema",
        "json_schema": wanted.model_dump(exclude={"type"}, exclude_none=True, by_alias=True),
    }
