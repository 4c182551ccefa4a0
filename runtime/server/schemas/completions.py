# SPDX-License-Identifier: Apache-2.0
"""The bodies of ``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nemo_build.runtime.server.schemas.chat import Messages, Tools
from nemo_build.runtime.server.schemas.common import (
    MOST_ANSWERS,
    MOST_TOKENS,
    Body,
    Items,
    Sampling,
    ShortText,
)

__all__ = ["CompletionRequest", "DetokenizeRequest", "TokenizeRequest"]

_TokenIds = Annotated[Items[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_TOKENS)]


class CompletionRequest(Sampling):
    """The body of a completion request."""

    prompt: (
        str
        | Annotated[Items[str], Field(max_length=MOST_ANSWERS)]
        | _TokenIds
        | Annotated[Items[_TokenIds], Field(max_length=MOST_ANSWERS)]
    )
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None


class TokenizeRequest(Body):
    """A text, or a conversation."""

    model: ShortText | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: ShortText | None = None
    tokens: _TokenIds
