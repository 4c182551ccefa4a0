# SPDX-License-Identifier: Apache-2.0
"""``/v1/completions``: texts that are gone on with."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring as quote
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.server.answers import (
    finish_name,
    least_logprob,
    nemo_member,
    shown_logprobs,
    token_text,
)
from nemo_build.runtime.server.asking import (
    check_model,
    encode,
    fit,
    log_unknown,
    output_grammar,
    sampling_params,
    scheduling_of,
    span_of,
)
from nemo_build.runtime.server.backend import Piece
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, JsonResponse
from nemo_build.runtime.server.generation import Asked, Usage, generate, seed_of
from nemo_build.runtime.server.record import Record
from nemo_build.runtime.server.schemas.common import MOST_ANSWERS
from nemo_build.runtime.server.schemas.completions import CompletionRequest
from nemo_build.runtime.server.sse import DONE, EventStream, until_gone
from nemo_build.runtime.server.strict import StrictRoute
from nemo_build.runtime.tokenizer import Tokenizer

__all__ = ["routes"]

_DEFAULT_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions."""


def routes(server: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])

    @router.post("/v1/completions", summary="Go on with a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        log_unknown(body)
        check_model(body.model, server.names)
        server.gate.check(_count(body))
        request.state.record.span = span_of("text_completion", body, request, server)
        completion = await asyncio.to_thread(_prepare, body, server, request.state.record)
        if body.stream:
            return await EventStream(completion.events()).begin(request.receive)
        return JsonResponse(await until_gone(request.receive, completion.whole()))

    return router


def _prepare(body: CompletionRequest, server: ServerContext, record: Record) -> _Completion:
    """What is to be generated. Raises ApiError if the request is invalid, or does not fit the context."""
    if body.suffix:
        message = "This model cannot fill in text before a suffix."
        raise ApiError(400, message, param="suffix", code="unsupported_value")
    answers = body.n or 1
    if body.best_of is not None and body.best_of != answers:
        message = "best_of other than n is not supported."
        raise ApiError(400, message, param="best_of", code="unsupported_value")
    prompts = _prompts(body, server)
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs is not supported: the log-probabilities of prompts are not computed."
        raise ApiError(400, message, param="echo", code="unsupported_value")
    grammar, scheduling = output_grammar(body), scheduling_of(body, server.timeout)
    asked = []
    for prompt in prompts:
        most = fit(server.backend.context, len(prompt), "prompt")
        wanted = min(body.max_tokens or _DEFAULT_TOKENS, most)
        params = sampling_params(
            body, server.backend.default_params, max_tokens=wanted, logprobs=body.logprobs
        )
        params = replace(params, grammar=grammar)
        skips = body.skip_special_tokens is not False
        asked += [
            Asked(prompt, replace(params, seed=seed_of(params.seed, i)), scheduling, skips)
            for i in range(answers)
        ]
    return _Completion(server, record, asked, answers, body)


def _count(body: CompletionRequest) -> int:
    """How many answers are wanted. Raises ApiError if they are too many."""
    count = len(_each(body)) * (body.n or 1)
    if count > MOST_ANSWERS:
        message = f"A request may have {MOST_ANSWERS} answers at most, all prompts together."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    return count


def _each(body: CompletionRequest) -> Sequence[str | list[int]]:
    """All prompts as they were given."""
    given = body.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    return [given] if is_one else given  # type: ignore[list-item,return-value]


def _prompts(body: CompletionRequest, server: ServerContext) -> list[list[int]]:
    """All prompts as token ids."""
    backend, special = server.backend, body.add_special_tokens is not False
    prompts = [
        encode(server, p, "prompt", add_special_tokens=special) if isinstance(p, str) else p
        for p in _each(body)
    ]
    if not prompts or not all(prompts):
        raise ApiError(400, "A prompt has no tokens.", param="prompt", code="invalid_value")
    if any(t >= backend.spec.vocab_size for p in prompts for t in p):
        message = f"A prompt has token ids above {backend.spec.vocab_size - 1}, which is the last one."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    return prompts


@dataclass
class _Text:
    """A completion.

    Attributes:
        parts: Of the text so far.
        logprobs: Of its tokens, those that were asked for.
        finish: How it ended.
    """

    parts: list[str]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None


class _Completion:
    """What a request wants, while it is generated.

    Args:
        server: What answers.
        record: Told what there is to be known of it.
        asked: What is to be generated: `answers` for each prompt, one after another.
        answers: How many of a prompt.
        body: The request.
    """

    def __init__(
        self,
        server: ServerContext,
        record: Record,
        asked: Sequence[Asked],
        answers: int,
        body: CompletionRequest,
    ) -> None:
        self.usage = Usage(prompt=sum(len(a.prompt) for a in asked[::answers]))
        self._server, self._asked, self._answers = server, asked, answers
        self._options = body.stream_options
        self._show_tokens = body.nemo is not None and body.nemo.tokens is True
        self._is_told = body.logprobs is not None
        decode = server.backend.tokenizer.decode
        echoes = [
            decode(a.prompt, skip_special_tokens=a.skip_special_tokens) if body.echo else "" for a in asked
        ]
        self._texts = [_Text([echo]) for echo in echoes]
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.name,
            "system_fingerprint": server.fingerprint,
        }
        self._record = record
        record.begin(self._head["id"], server.name, self.usage)

    async def _steps(self) -> AsyncGenerator[tuple[int, str, list[TokenLogprobs], list[Piece]], None]:
        """A text's index, what is new of it, and of its log-probabilities, and the pieces these came from."""
        server = self._server
        with server.gate.admit(len(self._asked)):
            async with aclosing(generate(server.backend, server.metrics, self._asked)) as steps:
                async for index, pieces in steps:
                    if pieces[0].cached_tokens is not None and index % self._answers == 0:
                        self.usage.cached += pieces[0].cached_tokens
                    self.usage.count(pieces)
                    self._record.token()
                    reason = pieces[-1].finish_reason
                    if reason is not None:
                        name = self._texts[index].finish = finish_name(reason)
                        self._record.finish.append(name)
                    text = "".join([p.text for p in pieces])
                    yield index, text, shown_logprobs(pieces), pieces

    async def whole(self) -> dict[str, Any]:
        """Everything at once, when it is done."""
        begins = [len(t.parts[0]) for t in self._texts]
        async with aclosing(self._steps()) as steps:
            async for index, text, found, _ in steps:
                self._texts[index].parts.append(text)
                self._texts[index].logprobs += found
        tokenizer = self._server.backend.tokenizer
        choices = [
            {
                "index": i,
                "text": "".join(t.parts),
                "logprobs": _logprobs(t.logprobs, tokenizer, begin)[0] if self._is_told else None,
                "finish_reason": t.finish,
            }
            for i, (t, begin) in enumerate(zip(self._texts, begins, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self.usage.to_json()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks, as server-sent events."""
        include_usage = self._options is not None and self._options.include_usage is True
        head = json.dumps(self._head, separators=(",", ":"))[:-1]
        tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        backend = self._server.backend
        offsets = [len(t.parts[0]) for t in self._texts]
        async with aclosing(self._steps()) as steps:
            async for index, text, found, pieces in steps:
                kept, end, told = self._texts[index], tail, "null"
                if kept.parts:  # the prompt comes before the first text
                    text = kept.parts.pop() + text
                if found:
                    member, offsets[index] = _logprobs(found, backend.tokenizer, offsets[index])
                    told = json.dumps(member)
                if self._show_tokens:
                    shown = nemo_member(pieces, self.usage, backend.speculator)
                    end = f',"nemo":{json.dumps(shown)}{tail}'
                finish = "null" if kept.finish is None else f'"{kept.finish}"'
                if text or found or self._show_tokens or kept.finish is not None:
                    choice = f'"text":{quote(text)},"logprobs":{told},"finish_reason":{finish}'
                    yield f'data: {head},"choices":[{{"index":{index},{choice}}}]{end}'.encode()
        if include_usage:
            yield f'data: {head},"choices":[],"usage":{json.dumps(self.usage.to_json())}}}\n\n'.encode()
        yield DONE


def _logprobs(
    found: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int
) -> tuple[dict[str, Any], int]:
    """``logprobs`` of a completion: lists by token; and where in the text the next token begins.

    Offsets are those of the tokens' own texts, one after another.
    """
    texts = [token_text(tokenizer, t.token) for t in found]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    member = {
        "tokens": texts,
        "token_logprobs": [least_logprob(t.logprob) for t in found],
        "top_logprobs": [
            {token_text(tokenizer, token): least_logprob(value) for token, value in t.top} for t in found
        ],
        "text_offset": offsets,
    }
    return member, offset
