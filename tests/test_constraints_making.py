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
    "multiple of a property with a name of its own": (
        "json_schema",
        '{"properties": {"default": {"type": "integer", "multipleOf": 2000003}}}',
    ),
    "multiple that a reference leads to": (
        "json_schema",
        '{"default": {"type": "integer", "multipleOf": 2000003}, "$ref": "#/default"}',
    ),
    "multiples together": (
        "json_schema",
        '{"type": "integer", "allOf": [{"multipleOf": 1999}, {"multipleOf": 1997}]}',
    ),
    "multiple in Lark": ("lark", 'start: "a" | %json {"type": "integer", "multipleOf": 2000005}'),
    "multiples in Lark": (
        "lark",
        "start: a b\n"
        + "".join(f'{c}: %json {{"multipleOf": {n}}}\n' for c, n in (("a", 1999), ("b", 1997))),
    ),
    "endless": ("regex", "(" * 3000 + "a" + ")*" * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_soon(name):
    kind, text = HOSTILE[name]
    assert "seconds" not in refusal(kind, text), "and not because the time is over"


def tools_of(properties: object, **scopes: object) -> str:
    parameters = {"properties": properties, **scopes}
    return json.dumps({"tools": [{"name": "f", "parameters": parameters}], "choice": "required"})


@pytest.mark.parametrize("times", [3, 500])
def test_alternatives_that_refer_to_themselves_are_looked_at_once(times):
    reference = {"$ref": "#/$defs/a"}
    text = tools_of({"x": reference}, **{"$defs": {"a": {"anyOf": [reference] * times}}})
    assert guide("tools", text).mask() is not None


def test_tools_that_refer_to_too_much_are_refused_soon():
    large = {"anyOf": [{"type": "object", "title": f"{i}"} for i in range(1500)]}
    many = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(3000)}
    assert "refer to too much" in refusal("tools", tools_of(many, **{"$defs": {"a": large}}))
    some = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(10)}
    assert guide("tools", tools_of(some, **{"$defs": {"a": large}})) is not None


def test_definitions_that_no_parameter_refers_to_cost_nothing():
    many = {f"p{i}": {"type": "integer"} for i in range(2000)}
    unused = {"$defs": {"a": {"enum": ["x" * 10_000]}}}
    assert guide("tools", tools_of(many, **unused)) is not None


@pytest.fixture
def held(monkeypatch):
    """Compiling waits until the event that this gives is set; the texts of what is compiled."""
    gate, begun = threading.Event(), []
    real = making._compile

    def wait(grammar, vocabulary):
        begun.append(grammar.text)
        assert gate.wait(20)
        return real(grammar, vocabulary)

    monkeypatch.setattr(making, "_compile", wait)
    yield gate, begun
    gate.set()


def test_grammars_that_nobody_waits_for_any_more_are_not_compiled(monkeypatch, held):
    gate, begun = held
    busy = Constraints(TOKENIZER, V, EOS)
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 0.1)

    def ask(text):
        return busy.guide(SamplingParams(grammar=Grammar("choice", json.dumps([text]))))

    for text in ("a", "b"):
        with pytest.raises(RequestError, match="takes more than"):
            ask(text)
    for text in ("c", "d", "c"):
        with pytest.raises(RequestError, match=r"because others were(?s:.*)Try again later"):
            ask(text)
    gate.set()
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 10)
    assert ask("d") is not None
    assert [json.loads(text)[0] for text in begun] == ["a", "b", "d"]


def test_a_grammar_that_is_withdrawn_is_compiled_for_who_asked_later(monkeypatch, held):
    gate, _ = held
    busy = Constraints(TOKENIZER, V, EOS)
    found: list[object] = []

    def ask(text):
        try:
            found.append(busy.guide(SamplingParams(grammar=Grammar("choice", json.dumps([text])))))
        except RequestError as error:
            found.append(error)

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("a", "b")]
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 10)
    for t in threads:
        t.start()
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 0.3)
    early = threading.Thread(target=ask, args=("c",))
    early.start()
    time.sleep(0.15)
    monkeypatch.setattr(making, "_COMPILE_SECONDS", 10)
    late = threading.Thread(target=ask, args=("c",))
    late.start()
    early.join()
    assert [type(f) for f in found] == [RequestError]
    gate.set()
    for t in (*threads, late):
        t.join()
    assert not any(isinstance(f, RequestError) for f in found[1:])
    assert len(found) == 4


def test_the_end_of_the_process_waits_for_no_grammar(held):
    _, begun = held
    busy = Constraints(TOKENIZER, V, EOS)
    asked = SamplingParams(grammar=Grammar("choice", '["a"]'))
    asker = threading.Thread(target=busy.guide, args=(asked,), daemon=True)
    asker.start()
    while not begun:
        time.sleep(0.01)
    compiling = [t for t in threading.enumerate() if t.name.startswith("grammar")]
    assert compiling
    assert all(t.daemon for t in compiling)


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
        logprobs=3,
        grammar=Grammar("regex", "a+", after_thinking=True),
        thinking=Thinking(7, grace=2, calls=("a",)),
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
        ({"thinking": {"budget": 1, "calls": "get"}}, "thinking.calls must be a list of names"),
        ({"thinking": 5}, "thinking must be a mapping"),
    ],
)
def test_parameters_that_are_wrong(given, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert words in str(caught.value)
