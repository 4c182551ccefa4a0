# SPDX-License-Identifier: Apache-2.0
"""From the members of a body to the runtime's parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from nemo_build.errors import RequestError
from nemo_build.runtime.params import Grammar, SamplingParams
from nemo_build.runtime.request import Scheduling
from nemo_build.runtime.server.backend import PROBE_PRIORITY
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, as_api_error
from nemo_build.runtime.server.schemas.chat import ChatRequest
from nemo_build.runtime.server.schemas.common import Body, ResponseFormat, Sampling
from nemo_build.runtime.server.schemas.completions import TokenizeRequest
from nemo_build.runtime.server.tracing import RequestSpan

__all__ = [
    "check_model",
    "encode",
    "fit",
    "log_unknown",
    "output_grammar",
    "own_variables",
    "rendered",
    "sampling_params",
    "scheduling_of",
    "span_of",
]

_log = logging.getLogger(__name__)

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)
"""Members that the runtime calls the same."""

_LEAST_TOP_P = 1e-30
"""In place of OpenAI's 0, which keeps the likeliest token alone, as this does."""

_MOST_PRIORITY = PROBE_PRIORITY - 1
"""The probe that finds out whether the engine generates goes first."""

_MOST_LOGGED = 100

_logged: set[str] = set()


def log_unknown(body: BaseModel) -> None:
    """Log the members of a body that mean nothing here, each once: they may be misspelt."""
    for found in _unknown(body, ""):
        if len(_logged) >= _MOST_LOGGED:
            return
        name = found[:100]
        if name not in _logged:
            _logged.add(name)
            _log.warning("member %r of a request means nothing to this server; it is ignored", name)


def _unknown(body: BaseModel, prefix: str) -> Iterator[str]:
    yield from (prefix + name for name in body.model_extra or ())
    for name in body.model_fields_set & set(type(body).model_fields):
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _unknown(value, f"{prefix}{name}.")


def check_model(name: str | None, served: tuple[str, ...]) -> None:
    """Raise ApiError (404) if a body asks for a model that is not served."""
    if name is not None and name not in served:
        raise ApiError(
            404,
            f"There is no model {name[:200]!r}; this server has {served[0]!r}.",
            param="model",
            code="model_not_found",
        )


def sampling_params(
    body: Sampling, defaults: SamplingParams, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The parameters of the first answer, without grammar and thinking.

    Args:
        body: The request.
        defaults: For what it does not say.
        max_tokens: Most tokens to generate.
        logprobs: How many alternatives to tell the log-probabilities of; ``None``: not even those of tokens.

    Raises:
        ApiError: A value is out of range.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    given |= {"include_stop": body.include_stop_str_in_output, "stop": body.stop, "logprobs": logprobs}
    given["logit_bias"] = _logit_bias(body.logit_bias)
    if body.top_p is not None:
        given["top_p"] = max(body.top_p, _LEAST_TOP_P)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        given["min_tokens"] = max_tokens
    try:
        return replace(defaults, max_tokens=max_tokens, **{k: v for k, v in given.items() if v is not None})
    except RequestError as error:
        raise as_api_error(error) from error


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    wrong = [token for token in bias if not (token.isascii() and token.isdecimal() and len(token) < 19)]
    if wrong:
        raise ApiError(
            400,
            f"logit_bias: {wrong[0][:50]!r} is no token id.",
            param="logit_bias",
            code="invalid_value",
        )
    return {int(token): value for token, value in bias.items()}


def scheduling_of(body: Sampling, timeout: float | None) -> Scheduling:
    """What a request asks of the scheduler; the server's own timeout is the most it gets."""
    given = [t for t in (body.timeout, timeout) if t is not None]
    speculate = body.nemo is None or body.nemo.speculate is not False
    return Scheduling(
        priority=max(-_MOST_PRIORITY, min(body.priority or 0, _MOST_PRIORITY)),
        timeout=min(given, default=None),
        salt=body.cache_salt,
        speculate=speculate,
    )


def output_grammar(body: Sampling) -> Grammar | None:
    """What the text has to look like by ``response_format``, ``guided_…`` or ``structured_outputs``.

    Raises:
        ApiError: More than one is given, or one makes no sense.
    """
    found = {**_guided(body), **_structured(body)}
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        found["response_format"] = _response_format(wanted)
    if len(found) > 1:
        names = ", ".join(found)
        message = f"An answer can have one form only, but several are asked for: {names}."
        raise ApiError(400, message, param=list(found)[1], code="invalid_value")
    return next(iter(found.values()), None)


def _guided(body: Sampling) -> dict[str, Grammar]:
    return _grammars("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _structured(body: Sampling) -> dict[str, Grammar]:
    wanted = body.structured_outputs
    if wanted is None:
        return {}
    prefix = "structured_outputs."
    found = _grammars(prefix, wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
    if wanted.json_object:
        found[f"{prefix}json_object"] = Grammar("json_object")
    return found


def _grammars(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> dict[str, Grammar]:
    """Those given, by the names that clients gave them under."""
    texts = {
        "json": ("json_schema", schema if schema is None or isinstance(schema, str) else json.dumps(schema)),
        "regex": ("regex", regex),
        "choice": ("choice", None if choice is None else json.dumps(choice)),
        "grammar": ("lark", grammar),
    }
    return {prefix + name: Grammar(kind, text) for name, (kind, text) in texts.items() if text is not None}


def _response_format(wanted: ResponseFormat) -> Grammar:
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format of the type json_schema needs json_schema.schema.",
            param="response_format.json_schema",
            code="invalid_value",
        )
    return Grammar("json_schema", json.dumps(wanted.json_schema.schema_))


def rendered(
    server: ServerContext,
    body: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation.

    Args:
        server: Whose template is used.
        body: Has the messages, and says how the text ends.
        tools: What of its tools is shown.
        variables: What the template is told besides.

    Raises:
        ApiError: The messages are invalid.
    """
    continues = body.continue_final_message is True
    try:
        return server.backend.template.render(
            [m.model_dump(exclude_unset=True) for m in body.messages or ()],
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            **variables,
        )
    except RequestError as error:
        raise as_api_error(error, "messages") from error
    except RecursionError:
        raise ApiError(400, "The messages are nested too deeply.", param="messages") from None


def encode(server: ServerContext, text: str, param: str, *, add_special_tokens: bool = False) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ApiError: It is too long, which is found out before much work is done, or no Unicode.
    """
    context = server.backend.context
    least = len(text.encode("utf-8", "surrogatepass")) // server.backend.tokenizer.longest_token
    if least > context:
        raise _too_long(context, f"at least {least}", param)
    try:
        return server.backend.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except RequestError as error:
        raise as_api_error(error, param) from error


def fit(context: int, prompt: int, param: str) -> int:
    """How many tokens may follow a prompt. Raises ApiError if not even one."""
    if prompt > context:
        raise _too_long(context, str(prompt), param)
    return context - prompt + 1


def _too_long(context: int, tokens: str, param: str) -> ApiError:
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, your {param} resulted in {tokens} "
        f"tokens. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


_RENDER_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def own_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """``chat_template_kwargs``. Raises ApiError if they give what is a member of the body."""
    taken = [name for name in _RENDER_ARGUMENTS if name in (given or ())]
    if taken:
        message = f"chat_template_kwargs cannot give {taken[0]}, which is a member of the body."
        raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
    return dict(given or {})


def span_of(operation: str, body: Sampling, request: Request, server: ServerContext) -> RequestSpan:
    """The span of a request, for traces."""
    asked = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "max_tokens": body.max_tokens,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
        "choice.count": body.n,
    }
    return server.tracing.request(operation, server.name, request.headers, asked)
