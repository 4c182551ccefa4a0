# SPDX-License-Identifier: Apache-2.0
"""Any text, cut anywhere: what is always so of the deltas; and calls as the template writes them come back."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_build.demo import CHECKPOINT
from nemo_build.runtime.chat import ChatTemplate, ToolCallArguments, ToolCallStart, opens_thinking

from .answers import Answer, deltas_of, join, tool

STRING = {"type": "string"}
TOOLS = [
    tool(
        "get",
        {
            **{name: name for name in ("string", "integer", "number", "boolean", "null", "object", "array")},
            "maybe": {"anyOf": [STRING, {"type": "null"}]},
            "level": {"enum": ["low", "high", 3, True]},
            "any": {},
        },
    ),
    tool("put", {}, additionalProperties=STRING),
    tool("a.b/c"),
]

# --- any text ----------------------------------------------------------------------------------------------

tags = ["<think>", "</think>", "<tool_call>", "</tool_call>", "</function>", "</parameter>"]
tags += [
    "<function=get>",
    "<function=put>",
    "<function=other>",
    "<function=no name>",
    "<function=",
    "<parameter=",
]
tags += ["<parameter=string>", "<parameter=any>", "<parameter=maybe>", '{"name": "get"', ', "arguments": {}}']
pieces = st.sampled_from(
    [*tags, "\n", " ", "<", "</", ">", "x", "5", "null", "{", "[]", '"', "\\"]
) | st.text(max_size=4)
texts = st.lists(pieces, max_size=25).map("".join)
options = st.fixed_dictionaries(
    {
        "thinking": st.booleans(),
        "tools": st.sampled_from([None, TOOLS]),
        "parallel": st.booleans(),
        "force_nonempty_content": st.booleans(),
    }
)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@settings(deadline=None, max_examples=300)
@given(text=texts, places=st.lists(st.integers(0, 1000), max_size=8), options=options)
def test_pieces_do_not_matter(text: str, places: list[int], options: dict[str, Any]) -> None:
    whole = join(deltas_of([text], **options))
    assert join(deltas_of(cut(text, places), **options)) == whole
    assert join(deltas_of(text, **options)) == whole
    assert all(isinstance(arguments, dict) for _, arguments in whole.arguments)
    assert options["parallel"] or len(whole.calls) <= 1


_MARKUP = re.compile(r"<think>|</think>|</?tool_call>|<function=|</function>|<parameter=|</parameter>|[\s>]")


def ink(text: str) -> str:
    """Text without tags, and without white space, which may or may not be text beside them."""
    return _MARKUP.sub("", text)


strings = st.sampled_from(
    [*(t for t in tags if "{" not in t and "<parameter=" not in t), "<parameter=>", "\n", " ", "<b>"]
)
words = st.integers(0, 99).map(lambda n: f"w{n}")
inked = st.lists(strings | words, max_size=25)


@settings(deadline=None, max_examples=300)
@given(parts=inked, thinking=st.booleans())
def test_nothing_of_the_text_is_lost(parts: list[str], thinking: bool) -> None:
    """In its order, too; parameters have names of their own, as the second of a name does not count."""
    named = [f"<parameter=p{i}>" if part == "<parameter=>" else part for i, part in enumerate(parts)]
    text = "".join(named) + " end"
    deltas = deltas_of([text], thinking=thinking, tools=[tool("put", {}, additionalProperties=STRING)])
    found = ""
    for kind, group in itertools.groupby(deltas, type):
        if kind is ToolCallStart:
            found += "".join(delta.name for delta in group)
            continue
        written = "".join(delta.text for delta in group)
        if kind is ToolCallArguments:
            written = "".join(f"{name}{value}" for name, value in json.loads(written).items())
        found += written
    assert ink(found) == ink(text)


# --- calls as the template writes them ---------------------------------------------------------------------

line = st.lists(
    st.sampled_from(
        ["<", "</", "<b>", "</function>", "</tool_call>", "{", '"', "\\", "é", " ", "\n", "null", "5"]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    max_size=8,
).map("".join)
_ENDS = ("</parameter>", "\n</function>", "\n</tool_call>", "\n<tool_call>", "\n<parameter=", "<|im_")


def is_plain(text: str) -> bool:
    """Whether the text cannot be taken for the end of a value by anybody."""
    return not any(end in f"\n{text}" for end in _ENDS)


value = line.filter(is_plain)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | value,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)
by_type: dict[str, st.SearchStrategy[Any]] = {
    "string": value,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "object": st.dictionaries(st.sampled_from("abc"), json_values, max_size=3),
    "array": st.lists(json_values, max_size=3),
    "maybe": st.none() | value.filter(lambda text: text.strip() not in ("null", "None")),
    "level": st.sampled_from(["low", "high", 3, True]),
}
calls = st.one_of(
    st.tuples(st.just("get"), st.fixed_dictionaries({}, optional=by_type)),
    st.tuples(st.just("put"), st.dictionaries(st.sampled_from(["x", "a b", "é-1"]), value)),
    st.tuples(st.just("a.b/c"), st.just({})),
)
prose = st.sampled_from(["", "Look.", "Let me see:\n\n1. <b>\n 2. </function>", "a < b"])


@cache
def template() -> ChatTemplate:
    return ChatTemplate.load(CHECKPOINT)


@settings(deadline=None, max_examples=200)
@given(
    calls=st.lists(calls, max_size=3),
    reasoning=prose,
    content=prose,
    places=st.lists(st.integers(0, 5000), max_size=8),
)
def test_rendered_calls_come_back(
    calls: list[tuple[str, dict[str, Any]]], reasoning: str, content: str, places: list[int]
) -> None:
    question = [{"role": "user", "content": "?"}]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    tool_calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    prompt = template().render(question, tools=TOOLS, enable_thinking=bool(reasoning))
    whole = template().render(
        [*question, message | ({"tool_calls": tool_calls} if calls else {})],
        tools=TOOLS,
        add_generation_prompt=False,
    )
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].removesuffix("<|im_end|>\n")
    answer = join(deltas_of(cut(text, places), thinking=opens_thinking(prompt), tools=TOOLS))
    assert json.dumps(answer.arguments) == json.dumps(calls)  # as Python's True == 1
    assert answer == Answer(reasoning, content, answer.calls)
