# SPDX-License-Identifier: Apache-2.0
"""What the bodies of requests share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["MOST_ANSWERS", "Body", "NemoOptions", "ResponseFormat", "Sampling", "StreamOptions"]

MOST_ANSWERS = 64
"""Answers that one request may ask for."""

_INT64 = 2**63


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

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """``structured_outputs``, vLLM's newer word for the ``guided_…`` members."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(Body):
    """How tokens are chosen, when an answer ends, and what is expected of the scheduler."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)]
        | None
    ) = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=_INT64)]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    cache_salt: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    nemo: NemoOptions | None = None
