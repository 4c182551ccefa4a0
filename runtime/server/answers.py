# SPDX-License-Identifier: Apache-2.0
"""Answers to a conversation: taken apart while they come, and put into OpenAI's chunks or one whole.

Chunks are put together from strings, not from models: there is one for every step of every stream.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import TYPE_CHECKING, Any

from nemo_build.runtime.chat import AnswerParser, Content, Delta, Reasoning, ToolCallStart
from nemo_build.runtime.chat.deltas import joined
from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.server.backend import Piece
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import unavailable
from nemo_build.runtime.server.generation import Asked, Usage, generate
from nemo_build.runtime.server.record import Record
from nemo_build.runtime.server.sse import DONE
from nemo_build.runtime.stopping import FinishReason
from nemo_build.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nemo_build.runtime.server.response_logprobs import ContentLogprobs

__all__ = [
    "Answers",
    "ChatAnswer",
    "Choice",
    "finish_name",
    "is_end",
    "least_logprob",
    "logprobs_content",
    "nemo_member",
    "shown_logprobs",
    "token_text",
]

_LEAST_LOGPROB = -9999.0
"""OpenAI's word for minus infinity, which JSON has not."""


def finish_name(reason: FinishReason) -> str:
    """OpenAI's name of how an answer ended. What ran out of time is as if it had run out of tokens."""
    if reason is FinishReason.CANCELLED:
        raise unavailable("The answer was cut off: the server is shutting down.")
    return "stop" if reason is FinishReason.STOP else "length"


def least_logprob(value: float) -> float:
    """A log-probability that JSON can hold."""
    return max(value, _LEAST_LOGPROB)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; bytes that are no character become U+FFFD."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def nemo_member(pieces: Sequence[Piece], usage: Usage, speculator: str | None) -> dict[str, Any]:
    """What the chat page wants to know of new tokens. The acceptance length is that of the request so far."""
    own = usage.completion - usage.accepted
    return {
        "tokens": [{"text": p.text, "drafted": p.drafted} for p in pieces if p.token_id is not None],
        "speculator": speculator,
        "acceptance_length": round(usage.completion / own, 3) if own else 1.0,
    }


class Choice:
    """One answer of several.

    Args:
        index: Which.
        parser: Takes it apart.
        told: Told of every piece, where the log-probabilities of content alone are wanted.

    Attributes:
        index: As given.
        logprobs: Of its tokens, those that were asked for.
        thought: Tokens of thinking.
        finish: How it ended.
    """

    def __init__(self, index: int, parser: AnswerParser, told: ContentLogprobs | None = None) -> None:
        self.index = index
        self.logprobs: list[TokenLogprobs] = []
        self.thought = 0
        self.finish: str | None = None
        self._parser, self._told = parser, told
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def push(self, pieces: Sequence[Piece]) -> list[Delta]:
        """Take new pieces; what they add."""
        parser, told = self._parser, self._told
        if told is not None:
            told.begin()
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.token_id is not None and parser.state == "reasoning":
                self.thought += 1
            found = parser.push(piece.text) if piece.text else []
            if told is not None:
                told.take(piece, found, parser.state)
            deltas += found
        reason = pieces[-1].finish_reason
        if reason is not None:
            found = parser.finish()
            if told is not None:
                told.finish(found)
            deltas += found
            name = finish_name(reason)
            is_called = parser.has_tool_calls and not parser.is_call_cut
            self.finish = "tool_calls" if name == "stop" and is_called else name
        return deltas if len(deltas) < 2 else joined(deltas)

    @property
    def is_call_cut(self) -> bool:
        """Whether the end of the text cut off the last call."""
        return self._parser.is_call_cut

    def keep(self, deltas: Sequence[Delta]) -> None:
        """Put what was added to the whole."""
        for delta in deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                self._calls.append((delta, []))
            else:
                self._calls[delta.index][1].append(delta.text)

    def message(self) -> dict[str, Any]:
        """What was kept, as a message."""
        content, reasoning = "".join(self._content), "".join(self._reasoning) or None
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(parts)}}
            for c, parts in self._calls
        ]
        message = {
            "role": "assistant",
            "content": None if not content and (calls or reasoning) else content,
            "refusal": None,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        return message | ({"tool_calls": calls} if calls else {})


class Answers:
    """Answers to a conversation, whatever they are put into.

    Args:
        server: What answers.
        record: Told what there is to be known of it.
        identity: Of the answer.
        asked: What is to be generated.
        choices: Where it goes.

    Attributes:
        usage: Tokens so far.
    """

    def __init__(
        self,
        server: ServerContext,
        record: Record,
        identity: str,
        asked: Sequence[Asked],
        choices: Sequence[Choice],
    ) -> None:
        self.usage = Usage(prompt=len(asked[0].prompt))
        self._server, self._record = server, record
        self._asked, self._choices = asked, choices
        record.begin(identity, server.name, self.usage)

    async def steps(self) -> AsyncGenerator[tuple[Choice, list[Piece], list[Delta]], None]:
        """Each choice's pieces and deltas as they come, counted."""
        server, usage = self._server, self.usage
        with server.gate.admit(len(self._asked)):
            async with aclosing(generate(server.backend, server.metrics, self._asked)) as steps:
                async for index, pieces in steps:
                    choice = self._choices[index]
                    if index == 0 and pieces[0].cached_tokens is not None:
                        usage.cached = pieces[0].cached_tokens
                    before = choice.thought
                    deltas = choice.push(pieces)
                    usage.count(pieces)
                    usage.reasoning += choice.thought - before
                    self._record.token()
                    if choice.finish is not None:
                        self._record.finish.append(choice.finish)
                    yield choice, pieces, deltas


class ChatAnswer(Answers):
    """Answers as OpenAI's chat completions.

    Args:
        server: What answers; this and the next three as of :class:`Answers`.
        record: Told what there is to be known of it.
        asked: What is to be generated.
        choices: Where it goes.
        include_usage: A stream ends with the usage.
        show_tokens: Chunks say which tokens came, and how.
    """

    def __init__(
        self,
        server: ServerContext,
        record: Record,
        asked: Sequence[Asked],
        choices: Sequence[Choice],
        *,
        include_usage: bool = False,
        show_tokens: bool = False,
    ) -> None:
        identity = f"chatcmpl-{secrets.token_hex(12)}"
        super().__init__(server, record, identity, asked, choices)
        self._include_usage, self._show_tokens = include_usage, show_tokens
        self._head: dict[str, Any] = {
            "id": identity,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": server.name,
            "system_fingerprint": server.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """Everything at once, when it is done."""
        async with aclosing(self.steps()) as steps:
            async for choice, pieces, deltas in steps:
                choice.keep(deltas)
                choice.logprobs += shown_logprobs(pieces)
        tokenizer = self._server.backend.tokenizer
        is_told = self._asked[0].params.logprobs is not None
        choices = [
            {
                "index": c.index,
                "message": c.message(),
                "logprobs": _logprobs_member(c.logprobs, tokenizer) if is_told else None,
                "finish_reason": c.finish,
            }
            for c in self._choices
        ]
        return {**self._head, "choices": choices, "usage": self.usage.to_json()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks, as server-sent events."""
        head = json.dumps({**self._head, "object": "chat.completion.chunk"}, separators=(",", ":"))[:-1]
        start = f'data: {head},"choices":[{{"index":'
        tail = ',"usage":null}\n\n' if self._include_usage else "}\n\n"
        begun: set[int] = set()
        async with aclosing(self.steps()) as steps:
            async for choice, pieces, deltas in steps:
                middle, end = "", tail
                if choice.index not in begun:
                    begun.add(choice.index)
                    role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
                    middle = f"{start}{choice.index},{role}{tail}"
                if self._show_tokens:
                    member = nemo_member(pieces, self.usage, self._server.backend.speculator)
                    end = f',"nemo":{json.dumps(member)}{tail}'
                logprobs = shown_logprobs(pieces)
                if deltas or self._show_tokens or logprobs:
                    told = _logprobs_text(logprobs, self._server.backend.tokenizer)
                    delta = f'"delta":{_delta(deltas)},"logprobs":{told},"finish_reason":null}}]'
                    middle += f"{start}{choice.index},{delta}{end}"
                if choice.finish is not None:
                    last = f'"delta":{{}},"logprobs":null,"finish_reason":"{choice.finish}"}}]'
                    middle += f"{start}{choice.index},{last}{tail}"
                if middle:
                    yield middle.encode()
        if self._include_usage:
            yield f'data: {head},"choices":[],"usage":{json.dumps(self.usage.to_json())}}}\n\n'.encode()
        yield DONE


def _delta(deltas: Sequence[Delta]) -> str:
    """JSON of what was added, in one delta."""
    reasoning = content = ""
    calls = []
    for delta in deltas:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, Reasoning):
            reasoning += delta.text
        elif isinstance(delta, ToolCallStart):
            function = f'{{"name":{quote(delta.name)},"arguments":""}}'
            calls.append(
                f'{{"index":{delta.index},"id":{quote(delta.id)},"type":"function","function":{function}}}'
            )
        else:
            calls.append(f'{{"index":{delta.index},"function":{{"arguments":{quote(delta.text)}}}}}')
    parts = []
    if reasoning:
        text = quote(reasoning)
        parts.append(f'"reasoning_content":{text},"reasoning":{text}')
    if content:
        parts.append(f'"content":{quote(content)}')
    if calls:
        parts.append(f'"tool_calls":[{",".join(calls)}]')
    return f"{{{','.join(parts)}}}"


def shown_logprobs(pieces: Sequence[Piece]) -> list[TokenLogprobs]:
    """Those of tokens that are part of the text; the one that ends it is not."""
    return [p.logprobs for p in pieces if p.logprobs is not None and not is_end(p)]


def is_end(piece: Piece) -> bool:
    """Whether a piece is the token that ends a text, which is no part of it."""
    return piece.finish_reason is FinishReason.STOP and piece.matched == piece.token_id


def _logprobs_text(found: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> str:
    return json.dumps(_logprobs_member(found, tokenizer)) if found else "null"


def logprobs_content(found: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Log-probabilities as OpenAI writes them, by the token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": least_logprob(logprob),
            "bytes": list(data),
        }

    return [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(*alternative) for alternative in t.top]}
        for t in found
    ]


def _logprobs_member(found: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """``logprobs`` of a choice."""
    return {"content": logprobs_content(found, tokenizer), "refusal": None}
