# SPDX-License-Identifier: Apache-2.0
"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from nemo_build.runtime.server.answers import token_text
from nemo_build.runtime.server.asking import check_model, encode, log_unknown, own_variables, rendered
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, JsonResponse
from nemo_build.runtime.server.schemas.common import MOST_TOKENS
from nemo_build.runtime.server.schemas.completions import DetokenizeRequest, TokenizeRequest
from nemo_build.runtime.server.strict import StrictRoute

__all__ = ["routes"]


def routes(server: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictRoute, tags=["Tokens"])

    @router.post("/tokenize", summary="The tokens of a text, or of a conversation")
    async def tokenize(body: TokenizeRequest) -> Response:
        log_unknown(body)
        check_model(body.model, server.names)
        return await asyncio.to_thread(_tokenized, body, server)

    @router.post("/detokenize", summary="The text of tokens")
    async def detokenize(body: DetokenizeRequest) -> Response:
        log_unknown(body)
        check_model(body.model, server.names)
        return await asyncio.to_thread(_detokenized, body.tokens, server)

    return router


def _tokenized(body: TokenizeRequest, server: ServerContext) -> JsonResponse:
    tokens = _encode(body, server)
    if len(tokens) > MOST_TOKENS:
        message = f"The text has {len(tokens)} tokens; at most {MOST_TOKENS} are told at a time."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    answer = {"count": len(tokens), "max_model_len": server.backend.context, "tokens": tokens}
    if body.return_token_strs:
        texts = {t: token_text(server.backend.tokenizer, t) for t in set(tokens)}
        answer["token_strs"] = [texts[t] for t in tokens]
    return JsonResponse(answer)


def _detokenized(tokens: list[int], server: ServerContext) -> JsonResponse:
    last = server.backend.spec.vocab_size - 1
    if max(tokens, default=0) > last:
        raise ApiError(400, f"The last token id is {last}.", param="tokens", code="invalid_value")
    return JsonResponse({"prompt": server.backend.tokenizer.decode(tokens, skip_special_tokens=False)})


def _encode(body: TokenizeRequest, server: ServerContext) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        message = "Give either a prompt or messages."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    special = body.add_special_tokens
    if body.prompt is not None:
        return encode(server, body.prompt, "prompt", add_special_tokens=special is not False)
    tools = [t.model_dump(exclude_unset=True) for t in body.tools or ()]
    text = rendered(server, body, tools, own_variables(body.chat_template_kwargs))
    return encode(server, text, "messages", add_special_tokens=special is True)
