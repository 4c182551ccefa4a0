# SPDX-License-Identifier: Apache-2.0
"""Tool calls: their form, what models get wrong in it, and arguments by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_build.runtime.chat import AnswerParser, Content, ToolCallArguments, ToolCallStart

from .answers import Answer, call, deltas_of, parse, tool

TOOLS = [tool("write", {"path": "string", "text": "string", "mode": "integer"}), tool("list"), tool("a b")]
WRITE = "<tool_call>\n<function=write>\n"
BODY = "<parameter=path>\nx\n</parameter>\n"
PATH = ("write", '{"path": "x"}')


def text_argument(value: str) -> Any:
    """What becomes of a value between the tags of a parameter, other parameters around it."""
    arguments = [("path", "p"), ("text", value), ("mode", "1")]
    answer = parse("so" + call("write", arguments) + "then", tools=TOOLS)
    ((name, given),) = answer.arguments
    assert (name, answer.content) == ("write", "so\nthen")
    assert list(given) == ["path", "text", "mode"]
    assert (given["path"], given["mode"]) == ("p", 1)
    return given["text"]


# --- beginning ---------------------------------------------------------------------------------------------


def test_several_calls() -> None:
    text = call("write", {"path": "x"}) + call("list") + call("a b")
    assert parse(text, tools=TOOLS).calls == [PATH, ("list", "{}"), ("a b", "{}")]


def test_without_white_space() -> None:
    parameters = "<parameter=path>x</parameter><parameter=mode>5</parameter>"
    text = f"<tool_call><function=write>{parameters}</function></tool_call>"
    assert parse(text * 2, tools=TOOLS).calls == [("write", '{"path": "x", "mode": 5}')] * 2


def test_functions_that_share_a_call() -> None:
    text = f"{WRITE}{BODY}</function>\n<function=list>\n</function>\n</tool_call>"
    assert parse(text, tools=TOOLS) == Answer("", "", [PATH, ("list", "{}")])


def test_an_unknown_function_right_behind_a_call_is_text() -> None:
    text = "<function=look>\n</function>"
    assert parse(call("list") + text, tools=TOOLS) == Answer("", text, [("list", "{}")])


def test_a_long_name_is_not_waited_for() -> None:
    parser = AnswerParser(thinking=False, tools=TOOLS)
    beginning = "<tool_call>\n<function="
    assert parser.push(beginning + "x" * 200) == []
    assert parser.push("x" * 100) == [Content(beginning + "x" * 300)]


def test_an_unknown_function_is_a_call() -> None:
    assert parse(call("mcp.server/look", {"at": "5"}), tools=TOOLS).calls == [
        ("mcp.server/look", '{"at": 5}')
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n\n",
        "<tool_call> is a tag",
        "<tool_call>\n<func",
        "<tool_call>\n<function=",
        "<tool_call>\n<function=wri",
        "<tool_call>\n<function=>\n",
        "<tool_call>\n<function=no name>\n",
        "<tool_call>\n<function=na\nme>",
        "<tool_call>\n<function=<tool_call>\n<function=",
        "<tool_call>\n<function=" + "x" * 300 + ">",
        "<tool_call><tool_call></tool_call>",
        "<tool_call>\n</tool_call>\n",
        "<tool_calls>",
        "<function=write>\n<parameter=path>\nx\n</parameter>\n</function>",
        "`</tool_call>`",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for whole in (text, f"so {text} then"):
        assert parse(whole, tools=TOOLS) == Answer("", whole)


def test_a_call_right_behind_what_is_none() -> None:
    answer = parse(f"<tool_call>\n<tool_call>{WRITE}{BODY}</function></tool_call>", tools=TOOLS)
    assert answer == Answer("", "<tool_call>\n<tool_call>", [PATH])


def test_no_parallel_calls() -> None:
    text = "so" + call("write", {"path": "x"}) + call("list") + "then" + call("write", {"path": "y"})
    assert parse(text, tools=TOOLS, parallel=False) == Answer("", "so\n\nthen", [PATH])
    json_form = '<tool_call>{"name": "list"}</tool_call>'
    assert parse(json_form * 2, tools=TOOLS, parallel=False).calls == [("list", "{}")]


# --- the JSON form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "write", "arguments": {"text": "<é>", "n": [1.50]}}', [{"text": "<é>", "n": [1.5]}]),
        ('\n{ "name": "write", "parameters": {}}\n', [{}]),
        ('{"name": "write"}', [{}]),
    ],
)
def test_json_form(text: str, calls: list[Any]) -> None:
    expected = [("write", arguments) for arguments in calls]
    for whole in (f"<tool_call>{text}</tool_call>", f"<tool_call>{text}"):
        answer = parse(whole, tools=TOOLS)
        assert (answer.content, answer.arguments) == ("", expected)
    answer = parse(f"<tool_call>{text}<tool_call>{text}</tool_call>so", tools=TOOLS)
    assert (answer.content, answer.arguments) == ("so", expected * 2)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"name": 5}',
        '{"name": "write", "arguments": [1]}',
        '{"name": "write", "arguments": {"x": NaN}}',
        '{"name": "write", "arguments": {',
        '{"name": "write"} and more',
        '{"name"' + "[" * 2000,
        '{"name": "write", "arguments": {"x": ' + "[" * 100_000,
    ],
)
def test_json_that_is_no_call(text: str) -> None:
    whole = f"<tool_call>{text}</tool_call>"
    assert parse(whole, tools=TOOLS) == Answer("", whole)


# --- missing ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "is_cut"),
    [
        ("", True),
        ("<parameter=te", True),
        ("<parameter=text>\nx", True),
        ("<parameter=text>\nx\n</param", True),
        ("<parameter=text>\nx\n</parameter>\n", True),
        ("</func", True),
        ("</function>", False),
        ("</tool_call>", False),
        ("</function>\n</tool_c", False),
        ("<parameter=text>\nx\n</function>\n</tool_call>", False),
        (f"</function></tool_call>{WRITE}", True),
        ('</function></tool_call><tool_call>{"name": "list"}', False),
    ],
)
def test_whether_the_end_cuts_a_call_off(end: str, is_cut: bool) -> None:
    text = WRITE + BODY + end
    for pieces in ([text], list(text)):
        parser = AnswerParser(thinking=False, tools=TOOLS)
        for piece in pieces:
            parser.push(piece)
        assert not parser.is_call_cut
        parser.finish()
        assert parser.has_tool_calls
        assert parser.is_call_cut == is_cut


def test_a_call_that_text_ends_is_not_cut_off() -> None:
    parser = AnswerParser(thinking=False, tools=TOOLS)
    parser.push(f"{WRITE}and so on")
    assert parser.finish() == []
    assert parser.has_tool_calls
    assert not parser.is_call_cut


def test_a_call_that_is_left_out_is_not_cut_off() -> None:
    parser = AnswerParser(thinking=False, tools=TOOLS, parallel=False)
    parser.push(call("list") + WRITE)
    parser.finish()
    assert not parser.is_call_cut


@pytest.mark.parametrize("ends", ["", "</function>", "</tool_call>", "</function>\n</tool_call>"])
@pytest.mark.parametrize("end", ["", "</parameter>\n"])
def test_missing_ends(end: str, ends: str) -> None:
    text = f"{WRITE}<parameter=path>\nx\n{end}{ends}"
    # Where nothing at all follows, the line end may be the value's own; it counts as the tag's.
    assert parse(text, tools=TOOLS) == Answer("", "", [PATH])
    text += "\n" if end or ends else ""
    assert parse(f"{text}{call('list')}so", tools=TOOLS) == Answer("", "so", [PATH, ("list", "{}")])


@pytest.mark.parametrize(
    "end", ["</parameter>\n", "</parameter>\n</function>\n", "</function>\n</tool_call>\n"]
)
def test_text_behind_a_call_that_lacks_an_end(end: str) -> None:
    text = f"{WRITE}<parameter=mode>\n1\n</parameter>\n<parameter=path>\nx\n{end}"
    calls = [("write", '{"mode": 1, "path": "x"}')]
    if end == "</parameter>\n":
        assert parse(f"{text}</function>so", tools=TOOLS) == Answer("", "so", calls)
    else:
        assert parse(f"{text}so", tools=TOOLS) == Answer("", "so", calls)


def test_a_parameter_without_its_end() -> None:
    text = (
        f"{WRITE}<parameter=path>\nx\n<parameter=text>\ny\n\n<parameter=mode>\n1\n</function>\n</tool_call>"
    )
    assert parse(text, tools=TOOLS).calls == [("write", '{"path": "x", "text": "y\\n", "mode": 1}')]
    unknown = text.replace("write", "unknown")
    assert parse(unknown, tools=TOOLS).arguments == [("unknown", {"path": "x", "text": "y\n", "mode": 1})]


def test_a_parameter_ended_twice() -> None:
    text = f"{WRITE}{BODY}</parameter>\n<parameter=mode>\n1\n</parameter>\n</function>\n</tool_call>"
    # The first of two is part of the value, as nothing shows yet that the second is the same by mistake.
    assert parse(text, tools=TOOLS).arguments == [("write", {"path": "x\n</parameter>", "mode": 1})]


def test_text_within_a_function_ends_the_call() -> None:
    text = f"{WRITE}so\n{BODY}"
    assert parse(text, tools=TOOLS) == Answer("", f"so\n{BODY}", [("write", "{}")])


@pytest.mark.parametrize("length", range(len(WRITE), len(WRITE + BODY)))
def test_cut_anywhere(length: int) -> None:
    text = (WRITE + BODY)[:length]
    answer = parse(text, tools=TOOLS)
    assert answer.content == ""
    name_ends = length >= len(WRITE + "<parameter=path>")
    has_value = length > len(WRITE + "<parameter=path>\n")
    half = length == len(WRITE + "<parameter=path>\nx\n<")  # may be the value's as well
    value = "x\n<" if half else "x" if has_value else ""
    assert answer.arguments == [("write", {"path": value} if name_ends else {})]


def test_a_name_without_its_bracket() -> None:
    text = f"{WRITE}<parameter=path\nx\n</parameter>\n</function>"
    assert parse(text, tools=TOOLS).calls == [PATH]
    assert parse(text.replace("x", "\nx"), tools=TOOLS).calls == [("write", '{"path": "\\nx"}')]


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "",
        "\n",
        "\n\n",
        " x ",
        "  x\n    y\n",
        '\\ " \x00 \x1f \u2028 é 日本 🙂',
        "5",
        "null",
        '"quoted"',
        "<",
        "</",
        "a <b>c</b> </d>\n<e/>\n</f>",
        "<parameter=text>",
        "\n<parameter=other>\n",
        "\n<parameter=path>\n",
        "x <tool_call>\n<function=write>",
        "\n<tool_call>\n<function=other>\n",
        "\n<tool_call>\n\n",
        '\n<tool_call>\n{"name": "write"}',
        "x</function></tool_call>",
        "\n</function>\n}",
        "\n</function> </tool",
        "\n</tool_call>\n\nso",
        "<parameter>1</parameter></x>",
        "<parameter>1</parameter>\n\n",
        "</parameter> </parameter>",
        "</think>",
        "<think>",
        "</parameter",
        "\n</parameter\n",
    ],
)
def test_strings_are_verbatim(value: str) -> None:
    assert text_argument(value) == value


def test_a_value_comes_while_it_is_written() -> None:
    parser = AnswerParser(thinking=False, tools=TOOLS)
    parser.push(f"{WRITE}<parameter=text>\n")

    def push(text: str) -> str:
        return "".join(d.text for d in parser.push(text) if isinstance(d, ToolCallArguments))

    assert [push(t) for t in ["a", '"b', "\n", "c<", "/", "d>", "\n", "</parameter>", "\n"]] == [
        *("a", '\\"b', "", "\\nc", "", "</d>", "", "", "")
    ]
    assert push("</function>") == '"}'


def test_the_first_of_two_parameters_of_a_name_counts() -> None:
    text = call("write", [("path", "x"), ("path", "y"), ("mode", "1")])
    assert parse(text, tools=TOOLS).calls == [("write", '{"path": "x", "mode": 1}')]


def test_id_and_name_come_once() -> None:
    deltas = deltas_of(call("write", {"path": "long " * 20}) * 2, thinking=False, tools=TOOLS)
    starts = [d for d in deltas if isinstance(d, ToolCallStart)]
    assert [(d.index, d.name) for d in starts] == [(0, "write"), (1, "write")]
    assert len({d.id for d in starts}) == 2
    assert all(d.id.startswith("call_") for d in starts)


# --- types -------------------------------------------------------------------------------------------------

REFERENCES = {
    "$defs": {
        "Level": {"enum": ["low", "high"]},
        "Point": {"type": "object", "properties": {}},
        "Round": {"anyOf": [{"$ref": "#/$defs/Round"}, {"type": "integer"}]},
        "a/b": {"type": "boolean"},
    }
}

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "text", "json_text"),
    [
        ("integer", "5", "5"),
        ("integer", " -0\n", "-0"),
        ("integer", "5.00", "5"),
        ("integer", "5.5", '"5.5"'),
        ("integer", "007", '"007"'),
        ("integer", "٣", '"٣"'),
        ("integer", "9" * 30, "9" * 30),
        ("integer", "five", '"five"'),
        ("integer", "", '""'),
        ("number", "5", "5"),
        ("number", "-1.50e+22", "-1.50e+22"),
        ("number", "NaN", '"NaN"'),
        ("number", "Infinity", '"Infinity"'),
        ("number", "1.", '"1."'),
        ("boolean", "true", "true"),
        ("boolean", "False", "false"),
        ("boolean", "yes", '"yes"'),
        ("boolean", "1", '"1"'),
        ("null", "null", "null"),
        ("null", "None", "null"),
        ("null", "nil", '"nil"'),
        ("object", '{"a": [1.50, "é"]}', '{"a": [1.50, "é"]}'),
        ("object", "[1]", '"[1]"'),
        ("object", "{'a': 1}", "\"{'a': 1}\""),
        ("object", '{"a": NaN}', '"{\\"a\\": NaN}"'),
        ("array", "\n[1,\n2]\n", "[1,\n2]"),
        ("array", "1, 2", '"1, 2"'),
        ("string", "5", '"5"'),
        ("string", "null", '"null"'),
        ({"type": ["integer", "null"]}, "5", "5"),
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "nullify", '"nullify"'),
        ({"type": ["string", "null"]}, "no\nway", '"no\\nway"'),
        ({"type": "string", "nullable": True}, "None", "null"),
        ({"anyOf": [STRING, INTEGER]}, "5", "5"),
        ({"anyOf": [STRING, INTEGER]}, "5 apples", '"5 apples"'),
        ({"anyOf": [STRING, INTEGER]}, "1" * 5000, '"' + "1" * 5000 + '"'),
        ({"oneOf": [{"type": "array"}, STRING]}, "[1]", "[1]"),
        ({"oneOf": [{"type": "array"}, STRING]}, "[1", '"[1"'),
        ({"oneOf": [{"type": "number"}, NULL]}, "1e5", "1e5"),
        ({"anyOf": [{"enum": ["1"]}, INTEGER]}, "1", '"1"'),
        ({"anyOf": [INTEGER, {}]}, "true", "true"),
        ({"allOf": [{"description": "x"}, INTEGER]}, "5", "5"),
        ({"enum": ["a", "b"]}, "5", '"5"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", 2]}, "1", '"1"'),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"enum": ["on", True, None]}, "True", "true"),
        ({"enum": ["on", True, None]}, "on", '"on"'),
        ({"const": 5}, "5", "5"),
        ({"enum": [float("nan")]}, "nan", '"nan"'),
        ({"$ref": "#/$defs/Level"}, "low", '"low"'),
        ({"$ref": "#/$defs/Point"}, "{}", "{}"),
        ({"$ref": "#/$defs/Round"}, "5", "5"),
        ({"$ref": "#/$defs/a~1b"}, "true", "true"),
        ({"$ref": "#/$defs/Missing"}, "5", "5"),
        ({"$ref": "https://example.com"}, "word", '"word"'),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, NULL]}, "null", "null"),
        ({"properties": {}}, '{"a": 1}', '{"a": 1}'),
        ({"items": {}}, "[]", "[]"),
        ({}, "5", "5"),
        ({}, "True", "true"),
        ({}, "5 apples", '"5 apples"'),
        ({}, '{"a": 1}', '{"a": 1}'),
        ({}, "{a}", '"{a}"'),
        ({"type": "money"}, "5", "5"),
        ({"type": 5, "enum": 5, "anyOf": 5}, "5", "5"),
        (True, "x", '"x"'),
    ],
)
def test_types(schema: Any, text: str, json_text: str) -> None:
    tools = [tool("f", {"x": schema}, **REFERENCES)]
    assert parse(call("f", {"x": text}), tools=tools).calls == [("f", f'{{"x": {json_text}}}')]


def test_parameters_that_are_not_declared() -> None:
    tools = [tool("any", {}), tool("strings", {"n": "integer"}, additionalProperties=STRING)]
    answer = parse(call("any", {"x": "5", "y": "z"}) + call("strings", {"x": "5", "n": "5"}), tools=tools)
    assert answer.arguments == [("any", {"x": 5, "y": "z"}), ("strings", {"x": "5", "n": 5})]


@pytest.mark.parametrize(
    "parameters", [None, 5, [], {"properties": 5}, {"properties": {"x": 5}}, {"type": "object"}]
)
def test_schemas_that_say_nothing(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert parse(call("f", {"x": "5"}), tools=tools).arguments == [("f", {"x": 5})]


def test_the_form_of_the_responses_api() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"properties": {"x": STRING}}}]
    assert parse(call("f", {"x": "5"}), tools=tools).arguments == [("f", {"x": "5"})]


def test_deep_values() -> None:
    deep = "[" * 100_000
    tools = [tool("f", {"x": "array"})]
    ((_, arguments),) = parse(call("f", {"x": deep}), tools=tools).calls
    assert json.loads(arguments) == {"x": deep}


def test_a_deep_schema() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert parse(call("f", {"x": "5"}), tools=[tool("f", {"x": schema})]).arguments == [("f", {"x": 5})]


def test_a_schema_in_which_many_references_lead_to_one() -> None:
    doubled = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
    tools = [tool("f", {"x": {"$ref": "#/$defs/0"}}, **{"$defs": doubled | {"60": {"enum": [5]}}})]
    assert parse(call("f", {"x": "5"}), tools=tools).arguments == [("f", {"x": 5})]
    assert parse(call("f", {"x": "x5"}), tools=tools).arguments == [("f", {"x": "x5"})]
