# SPDX-License-Identifier: Apache-2.0
"""Grammars with the demo checkpoint's tokenizer, and what they allow."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_build.demo import CHECKPOINT
from nemo_build.errors import RequestError
from nemo_build.runtime import Grammar, SamplingParams
from nemo_build.runtime.constraints.base import Guide, allows
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.tokenizer import Tokenizer

V, EOS = 3100, (2, 11)
"""The logits are wider than the vocabulary of 3072 tokens."""

THINK_END, CALL, CALL_END = 13, 14, 15

TOKENIZER = Tokenizer.load(CHECKPOINT)
CONSTRAINTS = Constraints(TOKENIZER, V, EOS)

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "count": {"type": "integer"},
                "unit": {"enum": ["c", "f", 1]},
                "where": {"$ref": "#/$defs/place"},
                "maybe": {"type": ["string", "null"]},
                "list": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["city", "count"],
            "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        },
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}

GRAMMARS = {
    "json_schema": json.dumps(PERSON),
    "json_object": "",
    "regex": "[a-c]{2,4}(-[0-9]+)*",
    "lark": 'start: "a" start "b" | "c"',
    "choice": '["yes", "yes and no", "no"]',
    "tools": json.dumps({"tools": [TOOL, OTHER], "choice": "auto"}),
}


def guide(kind: str, text: str | None = None, *, after_thinking: bool = False, **params) -> Guide:
    """The guide of a request with a grammar."""
    grammar = Grammar(kind, GRAMMARS[kind] if text is None else text, after_thinking)
    found = CONSTRAINTS.guide(SamplingParams(grammar=grammar, **params))
    assert found is not None
    return found


def refusal(kind: str, text: str) -> str:
    """What is said of a grammar that cannot be used."""
    with pytest.raises(RequestError) as caught:
        guide(kind, text)
    return str(caught.value)


def allowed(guide: Guide, after: list[int] | None = None) -> set[int]:
    """The tokens that are allowed there."""
    return set(np.flatnonzero(np.isfinite(guide.masked(np.zeros(V, np.float32), after or []))).tolist())


def run(guide: Guide, text: str) -> tuple[str, bool]:
    """How far a text gets, and whether it may end there."""
    taken: list[int] = []
    for token in TOKENIZER.encode(text):
        if not allows(guide.mask(), token):
            break
        guide.commit(token)
        taken.append(token)
    ends = allows(guide.mask(), EOS[0]) and allows(guide.mask(), EOS[1])
    return TOKENIZER.decode(taken, skip_special_tokens=False), ends


def takes(kind: str, text: str, grammar: str | None = None) -> bool:
    """Whether a grammar takes a whole text."""
    found, ends = run(guide(kind, grammar), text)
    return found == text and ends


def call(*parameters: tuple[str, str], name: str = "get") -> str:
    """A call as the model writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"
