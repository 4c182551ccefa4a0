# SPDX-License-Identifier: Apache-2.0
"""The bodies of ``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nemo_build.runtime.server.schemas.chat import FunctionTool, Message
from nemo_build.runtime.server.schemas.common import Body, Sampling

__all__ = ["CompletionRequest", "DetokenizeRequest", "TokenizeRequest"]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionRequest(Sampling):
    """The body of a completion request."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None


class TokenizeRequest(Body):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
