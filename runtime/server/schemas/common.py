# SPDX-License-Identifier: Apache-2.0
"""What the bodies of requests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = [
    "MOST_ANSWERS",
    "MOST_ITEMS",
    "MOST_TOKENS",
    "MOST_TOOLS",
    "Body",
    "GrammarText",
    "Items",
    "Metadata",
    "NemoOptions",
    "ResponseFormat",
    "Sampling",
    "ShortText",
    "StreamOptions",
]

MOST_ANSWERS = 64
"""Answers that one request may ask for."""

MOST_ITEMS = 16_384
"""Messages of a conversation, and items of an input."""

MOST_TOOLS = 1024
"""Tools, calls of a message, and parts of a content."""

MOST_TOKENS = 2**21
"""Token ids in one list."""

_MOST_NAMED_TOKENS = 1024
"""Tokens that end an answer, or that have a bias."""

_MOST_METADATA = 64

_INT64 = 2**63

_T = TypeVar("_T")

Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list whose check ends at the first item that is wrong: a body may have hundreds of thousands of them."""

ShortText = Annotated[str, Field(max_length=1024)]
"""A name, an id, or a word."""

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
"""A stop string."""

GrammarText = Annotated[str, Field(max_length=256 << 10)]
"""A text that a grammar is made of; as long as the longest that is compiled."""


def _at_most(most: int) -> BeforeValidator:
    """Refuses an object of more members before any of them is checked."""

    def check(value: object) -> object:
        if isinstance(value, Mapping) and len(value) > most:
            message = f"Object should have at most {most} members, not {len(value)}"
            raise PydanticCustomError("too_long", message)
        return value

    return BeforeValidator(check)


Metadata = Annotated[dict[str, Any], Field(max_length=_MOST_METADATA)]
"""What a client notes for itself."""


class Body(BaseModel):
    """Members of a wrong type are refused, as OpenAI does; unknown ones are let through, and logged once."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")


class NemoOptions(Body):
    """``nemo``: what OpenAI's interface has no words for."""

    tokens: bool | None = Field(None, description="Chunks say which tokens came, and which were drafts.")
    speculate: bool | None = Field(None, description="False: no drafts for this request.")


class JsonSchemaFormat(Body):
    """``json_schema`` of a response format."""

    name: ShortText | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Choices = Annotated[Items[GrammarText], Field(max_length=MOST_ITEMS)]
"""Texts of which an answer is one."""


class StructuredOutputs(Body):
    """``structured_outputs``, vLLM's newer word for the ``guided_…`` members."""

    json_: dict[str, Any] | GrammarText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None


class Sampling(Body):
    """How tokens are chosen, when an answer ends, and what is expected of the scheduler."""

    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[ShortText, Annotated[float, Field(ge=-100, le=100)]], _at_most(_MOST_NAMED_TOKENS)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    stop: StopText | Annotated[Items[StopText], Field(max_length=4)] | None = None
    stop_token_ids: (
        Annotated[Items[Annotated[int, Field(ge=0, lt=_INT64)]], Field(max_length=_MOST_NAMED_TOKENS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    cache_salt: ShortText | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    user: ShortText | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    nemo: NemoOptions | None = None
