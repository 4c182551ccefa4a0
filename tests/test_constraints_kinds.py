# SPDX-License-Identifier: Apache-2.0
"""What each kind of grammar allows, and what is said of those that cannot be used."""

from __future__ import annotations

import json
import re

import pytest

from nemo_build.runtime import Grammar, SamplingParams
from nemo_build.runtime.constraints.base import allows
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.constraints.vocabulary import Vocabulary

from .grammars import (
    CALL,
    CALL_END,
    EOS,
    OTHER,
    PERSON,
    TOKENIZER,
    TOOL,
    V,
    allowed,
    call,
    guide,
    refusal,
    run,
    takes,
)

# --- kinds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "json_schema",
            ['{"name": "Ö\\n", "ages": []}', '{"name":"","ages":[1, 2]}'],
            ['{"ages": []}', "{", ""],
        ),
        ("json_object", ['{"a": {"b": [null, 1e3]}}', "{}"], ["[]", "1", "{'a': 1}", '{"a"}']),
        ("regex", ["ab", "abca-12-3"], ["a", "ab-", "abcab"]),
        ("lark", ["c", "aacbb"], ["", "acb b", "aacb"]),
        ("choice", ["yes", "yes and no", "no"], ["yes and", "maybe", ""]),
    ],
)
def test_texts_of_a_kind(kind, good, bad):
    assert [takes(kind, text) for text in good] == [True] * len(good)
    assert [takes(kind, text) for text in bad] == [False] * len(bad)


def test_notations():
    """Anchors say nothing new, dollars of the text stay; GBNF is told from Lark."""
    assert takes("regex", "ab", "^a[b]$")
    assert takes("regex", "a$", r"^a\$")
    assert takes("regex", "a\\", r"a\\$")
    assert takes("lark", "ab", 'root ::= "a" [b-c]')
    assert not takes("lark", "aa", 'root ::= "a" [b-c]')


def test_blanks_in_json_are_bounded():
    assert takes("json_object", '{\n    "a": 1,\n    "b": [\n        2\n    ]\n}')
    assert not takes("json_object", '{  "a": 1}')
    assert not takes("json_object", '{\n\n"a": 1}')
    assert not takes("json_object", "{\n" + " " * 81 + '"a": 1}')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "thing"}, "thing"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_what_a_schema_asks_and_the_library_cannot_hold_is_named(schema, word):
    assert word in refusal("json_schema", json.dumps(schema))


def test_texts_that_are_no_grammar():
    assert "no JSON" in refusal("json_schema", "{")
    assert "an object" in refusal("json_schema", "[1]")
    assert "list of strings" in refusal("choice", "[1]")
    assert "list of strings" in refusal("choice", '["a", ""]')
    assert "empty" in refusal("regex", "")
    assert "empty" in refusal("lark", " ")
    assert "regex" in refusal("regex", "(a")
    assert "lark" in refusal("lark", "start: nothing")
    assert "GBNF" in refusal("lark", "root ::= (")
    assert "no kind of grammar 'poem'; there are json_schema," in refusal("poem", "")


# --- tool calls --------------------------------------------------------------------------------------------


LEAST = (("city", "A <b>\n</ c"), ("count", "-3"))


def tools(choice: str, *, parallel: bool = True) -> str:
    return json.dumps({"tools": [TOOL, OTHER], "choice": choice, "parallel": parallel})


def test_calls_and_their_values():
    good = [
        call(*LEAST),
        call(*LEAST, ("unit", "c")),
        call(*LEAST, ("unit", "1"), ("where", '{"x": 3}'), ("maybe", "null or text"), ("list", "[1.5, 2]")),
        call(("city", ""), ("count", "0")),
        call(name="now"),
        "\n\n" + call(name="now") + "\n",
    ]
    bad = [
        call(("city", "A")),  # one is missing
        call(("count", "3"), ("city", "A")),
        call(("city", "A"), ("count", "three")),
        call(("city", "A"), ("count", "3"), ("unit", "k")),
        call(("city", "A"), ("count", "3"), ("where", '{"x": "3"}')),
        call(("city", "A</parameter> B"), ("count", "3")),
        call(*LEAST, ("unit", "c"), ("unit", "f")),
        call(*LEAST, ("more", "1")),
        call(name="then"),
        "text " + call(name="now"),
        "",
    ]
    assert [takes("tools", text, tools("required")) for text in good] == [True] * len(good)
    assert [takes("tools", text, tools("required")) for text in bad] == [False] * len(bad)


def test_choices_of_tools():
    one, two = call(name="now"), call(name="now") + "\n" + call(*LEAST)
    assert takes("tools", two, tools("required"))
    assert not takes("tools", two, tools("required", parallel=False))
    assert takes("tools", one, tools("now"))
    assert not takes("tools", call(*LEAST), tools("now"))
    assert not takes("tools", two, tools("now"))
    for text in ("", "Some text, and <tool", "Let me see.\n\n" + two, one):
        assert takes("tools", text, tools("auto")), text
    assert not takes("tools", one + " and text", tools("auto"))
    assert not takes("tools", two, tools("auto", parallel=False))


def test_calls_or_json():
    text = json.dumps({"tools": [OTHER], "choice": "auto", "content": PERSON})
    one = call(name="now")
    for good in (one, one + one, '{"name": "x", "ages": []}'):
        assert takes("tools", good, text)
    for bad in ("text", '{"name": "x"}', '{"name": "x", "ages": []}' + one, ""):
        assert not takes("tools", bad, text)
    assert "content must be" in refusal("tools", json.dumps({"tools": [OTHER], "content": 3}))


def test_the_marks_of_a_call_are_tokens():
    assert CALL in allowed(guide("tools"))
    assert CALL_END not in allowed(guide("tools"))
    begun = guide("tools")
    run(begun, "text <tool_call")
    assert TOKENIZER.encode(">")[0] not in allowed(begun), "the mark may not be spelled"


@pytest.mark.parametrize(
    ("kind", "text"), [("choice", '["</think>"]'), ("json_schema", '{"const": "a </tool_call> b<think>"}')]
)
def test_names_of_special_tokens_are_text(kind, text):
    """Where nothing else can follow the library gives the tokens of the text, which are not those."""
    spelled, taken = guide(kind, text), []
    while not allows(spelled.mask(), EOS[0]):
        options = allowed(spelled)
        assert not options & TOKENIZER.added_ids
        taken.append(min(options))
        spelled.commit(taken[-1])
    said = TOKENIZER.decode(taken, skip_special_tokens=False)
    assert said == ("</think>" if kind == "choice" else '"a </tool_call> b<think>"')


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_marks_that_have_no_tokens(monkeypatch, choice):
    """They are text then, and told from it while they come."""
    monkeypatch.setattr(Vocabulary, "single", lambda vocabulary, mark: None)
    spelled = Constraints(TOKENIZER, V, EOS).guide(SamplingParams(grammar=Grammar("tools", tools(choice))))
    text = "I <tool_c now" * (choice == "auto") + call(name="now")
    for piece in re.split(r"(?<=<)(?=/?tool_call)", text):  # the marks themselves would be taken for tokens
        for token in TOKENIZER.encode(piece):
            assert allows(spelled.mask(), token), (piece, token)
            spelled.commit(token)
    assert allows(spelled.mask(), EOS[0])
    [letter] = TOKENIZER.encode("x")
    assert not allows(spelled.mask(), letter), "no text behind a call"


def test_a_function_of_any_parameters():
    free = {"name": "free", "parameters": {"type": "object"}}
    text = json.dumps({"tools": [{"type": "function", "function": free}], "choice": "free"})
    assert takes("tools", call(("a b", "x\ny"), ("c", "1"), name="free"), text)
    assert takes("tools", call(name="free"), text)
    closed = {"name": "closed", "parameters": {"type": "object", "additionalProperties": False}}
    text = json.dumps({"tools": [closed], "choice": "required"})
    assert takes("tools", call(name="closed"), text)
    assert not takes("tools", call(("a", "x"), name="closed"), text)


def test_tools_that_cannot_be_used():
    wrong = [
        {"function": {"name": "a>b"}},
        TOOL,
        TOOL,
        {"function": {"name": "f", "parameters": {"type": "array", "minProperties": 1}}},
        {
            "function": {
                "name": "g",
                "parameters": {"properties": {"x\n": {}, "y": 3, "z": {"const": "</parameter>"}}},
            }
        },
        {"function": {"name": "h", "parameters": 3}},
    ]
    said = refusal("tools", json.dumps({"tools": wrong, "choice": "nobody", "parallel": "no"}))
    for words in (
        "'a>b'",
        "two functions 'get'",
        "minProperties, type 'array'",
        "'x\\n'",
        "got 3",
        "</parameter>",
    ):
        assert words in said
    assert "no function 'nobody'" in said
    assert "'no'" in said
    assert "no tools" in refusal("tools", '{"tools": []}')
    assert "JSON object" in refusal("tools", "[]")
    deep = {
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "array", "uniqueItems": True}}}}
    }
    assert "uniqueItems" in refusal("tools", json.dumps({"tools": [deep]}))


def test_multiples_may_have_zeros_at_their_end():
    assert takes("json_schema", "3000000", '{"type": "integer", "multipleOf": 1000000}')
    assert not takes("json_schema", "3000001", '{"type": "integer", "multipleOf": 1000000}')
