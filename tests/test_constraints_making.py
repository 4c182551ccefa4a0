# SPDX-License-Identifier: Apache-2.0
"""Compiling grammars, hostile ones too, and the parameters that ask for them."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime import Grammar, SamplingParams, Thinking
from nemo_build.runtime.constraints import making
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.constraints.vocabulary import Vocabulary

from .grammars import (
    EOS,
    GRAMMARS,
    THINK_END,
    TOKENIZER,
    V,
    allowed,
    guide,
    refusal,
    run,
)

# --- compiling ---------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


HOSTILE = {
    "deep": ("json_schema", nested(5000)),
    "long": ("json_schema", json.dumps({"enum": ["x" * 1000] * 300})),
    "crossed": (
        "json_schema",
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}
        ),
    ),
    "multiple": ("json_schema", '{"properties": {"a": {"type": "number", "multipleOf": 9999991}}}'),
    "multiple of a tool": (
        "tools",
        json.dumps(
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"type": "number", "multipleOf": 9999991}}},
                        },
                    }
                ],
                "choice": "required",
                "parallel": True,
            }
        ),
    ),
    "endless": ("regex", "(" * 3000 + "a" + ")*" * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_soon(name):
    kind, text = HOSTILE[name]
    start = time.thread_time()
    refusal(kind, text)
    assert time.thread_time() - start < 2


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch):
    slow = Constraints(TOKENIZER, V, EOS)
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 0.05)
    gate = threading.Event()
    real = making._compile
    monkeypatch.setattr(making, "_compile", lambda *args: gate.wait(10) and real(*args))
    wanted = SamplingParams(grammar=Grammar("choice", '["a"]'))
    with pytest.raises(RequestError, match=r"more than 0\.05 seconds"):
        slow.guide(wanted)
    gate.set()
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 10)
    assert slow.guide(wanted) is not None, "it was compiled meanwhile"


def test_grammars_are_compiled_once_by_any_thread_and_few_are_kept(monkeypatch):
    compiled: list[str] = []
    real = making._compile

    def count(grammar, vocabulary):
        compiled.append(grammar.text)
        return real(grammar, vocabulary)

    monkeypatch.setattr(making, "_compile", count)
    monkeypatch.setattr(making, "_MOST_KEPT", 2)
    few = Constraints(TOKENIZER, V, EOS)

    def ask(text):
        return few.guide(SamplingParams(grammar=Grammar("choice", json.dumps([text]))))

    threads = [threading.Thread(target=ask, args=("a",)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for text in ("b", "a", "c", "a", "b"):
        assert ask(text) is not None
    assert [json.loads(text)[0] for text in compiled] == ["a", "b", "c", "b"], "b was used least"


def test_guides_of_one_grammar_are_apart():
    one, two = guide("json_schema"), guide("json_schema")
    run(one, '{"name"')
    assert allowed(two) == allowed(guide("json_schema"))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bare = Constraints(TOKENIZER, V, EOS)
    with pytest.raises(UserError, match=r"(?s)llguidance.*nemo-build\[serve\]"):
        bare.guide(SamplingParams(grammar=Grammar("json_object")))
    assert bare.guide(SamplingParams(thinking=Thinking(3))) is not None, "budgets need none"
    assert bare.guide(SamplingParams()) is None


def test_a_mark_is_found_whatever_it_is_spelled_with():
    vocabulary = Vocabulary(TOKENIZER, V, EOS)
    assert vocabulary.completing(b"</think>", b"") == ([THINK_END], [])
    ends, beyond = vocabulary.completing(b"</think>", b"</think")
    assert {TOKENIZER.token_bytes(t) for t in ends} == {b">", b"</think>"}
    assert all(TOKENIZER.token_bytes(t).startswith(b">") for t in beyond)
    assert beyond


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["", "a", "string", "#/$defs/a", ">", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "required",
                    "$ref",
                    "$defs",
                    "anyOf",
                    "enum",
                    "const",
                    "items",
                    "a",
                    "function",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(schema=_VALUES, choice=_VALUES, parallel=_VALUES, kind=st.sampled_from(sorted(GRAMMARS)))
def test_whatever_is_given_is_taken_or_refused(schema, choice, parallel, kind):
    function = {"name": "a", "parameters": schema}
    content = {"content": schema} if choice == [] else {}
    tools = [{"function": function}, schema] if parallel else [function]
    texts = {
        "tools": json.dumps({"tools": tools, "choice": choice or "auto", "parallel": parallel} | content)
    }
    for text in (texts.get(kind, json.dumps(schema)), str(schema)):
        with contextlib.suppress(RequestError):
            assert guide(kind, text).mask() is not None


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark", "choice", "tools"])
def test_half_a_surrogate_pair_is_refused(kind):
    texts = {
        "json_schema": '{"const": "\\ud800"}',
        "regex": "a\ud800",
        "lark": 'start: "\ud800"',
        "choice": '["\\ud800"]',
        "tools": json.dumps({"tools": [{"name": "\ud800"}]}),
    }
    assert refusal(kind, texts[kind])


def test_circles_of_references():
    circle = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}, "b": {"$ref": "#/$defs/b"}}}
    for name in "ab":
        parameters = circle | {"properties": {"x": {"$ref": f"#/$defs/{name}"}}}
        text = json.dumps({"tools": [{"name": "f", "parameters": parameters}]})
        with contextlib.suppress(RequestError):
            assert guide("tools", text).mask() is not None


# --- parameters --------------------------------------------------------------------------------------------


def test_parameters_travel_as_json():
    params = SamplingParams(
        logprobs=3, grammar=Grammar("regex", "a+", after_thinking=True), thinking=Thinking(7, grace=2)
    )
    back = SamplingParams(**json.loads(json.dumps(asdict(params))))
    assert back == params
    assert SamplingParams(**json.loads(json.dumps(asdict(SamplingParams())))) == SamplingParams()
    assert SamplingParams(thinking={"budget": 3}).thinking == Thinking(3, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"grammar": "a"}, "grammar must be a mapping"),
        ({"grammar": {"kind": 3, "txt": ""}}, "grammar.txt is unknown"),
        ({"grammar": {"kind": 3, "text": None}}, "grammar.text must be a string"),
        ({"grammar": {}}, "grammar.kind is missing"),
        ({"thinking": {"budget": -1}}, "thinking.budget must be an integer"),
        ({"thinking": {"budget": 1.5}}, "thinking.budget"),
        ({"thinking": {"grace": 1}}, "thinking.budget is missing"),
        ({"thinking": 5}, "thinking must be a mapping"),
    ],
)
def test_parameters_that_are_wrong(given, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert words in str(caught.value)
