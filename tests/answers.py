# SPDX-License-Identifier: Apache-2.0
"""Answers taken apart, for tests: the deltas of ``AnswerParser`` joined, and checked on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_build.runtime.chat import (
    AnswerParser,
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass
class Answer:
    """The joined deltas: calls as (name, JSON text of the arguments)."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.calls]


def join(deltas: Iterable[Delta]) -> Answer:
    """Join deltas as a client does; checks the order of those of calls, and that ids are unique."""
    answer = Answer()
    ids = []
    for delta in deltas:
        match delta:
            case Reasoning(text):
                assert text
                answer.reasoning += text
            case Content(text):
                assert text
                answer.content += text
            case ToolCallStart(index, id, name):
                assert index == len(answer.calls)
                ids.append(id)
                answer.calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert text
                assert index == len(answer.calls) - 1
                name, before = answer.calls[index]
                answer.calls[index] = (name, before + text)
    assert len(set(ids)) == len(ids)
    return answer


def deltas_of(pieces: Iterable[str], **options: Any) -> list[Delta]:
    parser = AnswerParser(**options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.finish()
    assert parser.has_tool_calls == any(isinstance(d, ToolCallStart) for d in deltas)
    return deltas


def parse(text: str, *, thinking: bool = False, **options: Any) -> Answer:
    """Parse whole, by character, and cut in two at every place; all must give the same."""
    answer = join(deltas_of([text], thinking=thinking, **options))
    assert join(deltas_of(text, thinking=thinking, **options)) == answer
    if len(text) < 500:
        for i in range(1, len(text)):
            assert join(deltas_of([text[:i], text[i:]], thinking=thinking, **options)) == answer, text[:i]
    for name, arguments in answer.calls:
        assert isinstance(json.loads(arguments), dict), name
    return answer


def tool(name: str, properties: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A function as in OpenAI's requests; a property is its schema, or the name of its type."""
    function: dict[str, Any] = {"name": name}
    if properties is not None:
        schemas = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
        function["parameters"] = {"type": "object", "properties": schemas, **more}
    return {"type": "function", "function": function}


def call(name: str, arguments: Mapping[str, str] | Sequence[tuple[str, str]] = ()) -> str:
    """A call as the template writes it."""
    items = arguments.items() if isinstance(arguments, Mapping) else arguments
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in items)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>\n"
