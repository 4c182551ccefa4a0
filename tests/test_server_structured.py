# SPDX-License-Identifier: Apache-2.0
"""Tool calls and structured output through the server, under speculation."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from nemo_build.runtime import Engine
from nemo_build.runtime.server.backend import EngineBackend

from .serving import Served, served

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "temperature": 0}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 50},
        "good": {"type": "boolean"},
    },
    "required": ["name", "count", "good"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"zone": {"enum": ["utc"]}}, "required": ["zone"]},
    },
}


@pytest.fixture(scope="module")
def server(demo_engine_directory) -> Served:
    engine = Engine.load(demo_engine_directory, speculate="mtp", draft_length=3, threads=1)
    with served(EngineBackend(engine, speculate="mtp")) as found:
        yield found


def format_of(schema: dict) -> dict:
    """A response format."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": format_of(SCHEMA)},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "guided_json", "guided_json-text", "structured_outputs"],
)
def test_an_answer_of_a_schema_begins_behind_the_thinking(server, form):
    answer = server.post(CHAT, **ASK, **form, thinking_budget=8)
    [choice] = answer["choices"]
    assert choice["message"]["reasoning"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    chunks = server.chunks(CHAT, **ASK, **form, thinking_budget=8)
    streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert streamed == choice["message"]["content"]


def test_the_other_forms(server):
    def content(**form) -> str:
        answer = server.post(CHAT, **ASK, **form, enable_thinking=False)
        assert answer["choices"][0]["finish_reason"] == "stop"
        return answer["choices"][0]["message"]["content"]

    assert re.fullmatch(r"[0-9]{3}-[a-c]+", content(guided_regex=r"[0-9]{3}-[a-c]{1,5}"))
    assert content(guided_choice=["yes", "no"]) in ("yes", "no")
    assert content(structured_outputs={"choice": ["red"]}) == "red"
    assert content(guided_grammar='start: "ab" /c{2,4}/') in ("abcc", "abccc", "abcccc")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}
    assert json.loads(content(response_format=format_of({**schema, "required": ["a"]}))) == {"a": 1}
    [text] = server.post("/v1/completions", prompt="x", guided_choice=["left", "right"])["choices"]
    assert text["text"] in ("left", "right")
    assert content(response_format={"type": "text"})


def test_a_stop_string_in_the_thinking_ends_the_answer(server):
    thought = server.post(CHAT, **ASK)["choices"][0]["message"]["reasoning"]
    form = {"response_format": format_of(SCHEMA), "stop": thought[4:9]}
    [choice] = server.post(CHAT, **ASK, **form)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert choice["message"]["reasoning"] == thought[: thought.index(thought[4:9])]


def test_forms_that_cannot_be(server):
    cases = [
        ({"guided_regex": "(", "enable_thinking": False}, None),
        ({"guided_json": {"type": "nonsense"}}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": format_of({"type": "object", "unevaluatedItems": {"x": 1}})}, None),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ]
    for change, param in cases:
        error = server.refused(CHAT, **ASK, **change)
        assert error["type"] == "invalid_request_error"
        assert param is None or error["param"] == param, (change, error)
    assert server.idle()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be(server, choice):
    tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
    ask = {**ASK, "tools": tools, "tool_choice": choice, "thinking_budget": 8}
    [found] = server.post(CHAT, **ask)["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    call = found["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
    chunks = server.chunks(CHAT, **ask)
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(d["function"].get("arguments", "") for d in deltas) == call["function"]["arguments"]
    assert [d["function"]["name"] for d in deltas if "name" in d["function"]] == ["get_weather"]
    assert [d["index"] for d in deltas] == [0] * len(deltas)
    assert "id" in deltas[0]
    assert not any("id" in d for d in deltas[1:])
    assert len(deltas) > 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_conversation_with_calls_goes_on(server):
    [found] = server.post(CHAT, **ASK, tools=[WEATHER], tool_choice="required", thinking_budget=4)["choices"]
    message = found["message"]
    messages = [
        *ASK["messages"],
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"},
    ]
    [after] = server.post(CHAT, **{**ASK, "messages": messages, "max_tokens": 8}, tools=[WEATHER])["choices"]
    assert after["message"]["reasoning"] or after["message"]["content"]


def test_tools_without_choice_and_with_a_form(server):
    free = server.post(CHAT, **ASK, tools=[WEATHER], thinking_budget=4)["choices"][0]
    assert free["finish_reason"] in ("stop", "length", "tool_calls")
    none = server.post(CHAT, **ASK, tools=[WEATHER], tool_choice="none", thinking_budget=4)["choices"][0]
    assert "tool_calls" not in none["message"]
    both = server.post(CHAT, **ASK, tools=[WEATHER], response_format=format_of(SCHEMA), thinking_budget=4)[
        "choices"
    ][0]
    if both["finish_reason"] == "tool_calls":
        arguments = json.loads(both["message"]["tool_calls"][0]["function"]["arguments"])
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    else:
        jsonschema.validate(json.loads(both["message"]["content"]), SCHEMA)
    refused = server.refused(CHAT, **ASK, tools=[WEATHER], guided_regex="a")
    assert refused["param"] == "response_format"
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert server.post(CHAT, **{**ASK, "max_tokens": 5}, tools=[strict])["choices"]


def test_tools_that_may_not_be_called_are_not_shown(server):
    def prompt(**change) -> int:
        return server.post(CHAT, **{**ASK, "max_tokens": 1}, **change)["usage"]["prompt_tokens"]

    assert prompt(tools=[WEATHER], tool_choice="none") == prompt() < prompt(tools=[WEATHER])
    twice = server.refused(CHAT, **ASK, tools=[WEATHER, WEATHER], tool_choice="none")
    assert twice["param"] == "tools"


@pytest.mark.parametrize(
    "text", ["not json", "[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 990 + "1" + "}" * 990]
)
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_schemas_beside_tools_that_are_none(server, text, choice):
    for form in ({"guided_json": text}, {"structured_outputs": {"json": text}}):
        error = server.refused(CHAT, **ASK, **form, tools=[WEATHER], tool_choice=choice)
        assert len(error["message"]) < 1000


def test_one_of_two_forms_beside_tools(server):
    """The first token decides, which a bias chooses."""
    ask = {**ASK, "tools": [WEATHER], "response_format": format_of(SCHEMA), "enable_thinking": False}
    [call], [brace] = (server.post("/tokenize", prompt=text)["tokens"] for text in ("<tool_call>", "{"))
    once = {"logit_bias": {str(call): 100}, "parallel_tool_calls": False}
    called = server.post(CHAT, **ask, **once)["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    written = server.post(CHAT, **ask, logit_bias={str(brace): 100})["choices"][0]
    jsonschema.validate(json.loads(written["message"]["content"]), SCHEMA)
    assert "tool_calls" not in written["message"]


def test_tools_that_cannot_be(server):
    def tool(**function) -> dict:
        return {"type": "function", "function": function}

    cases = [
        ({"tools": [tool(name="a"), tool(name="a")]}, "tools"),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool()]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(name="a", parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(name="a", parameters={"properties": []})]}, "tools[0].function.parameters"),
        ({"tools": [tool(name="a", parameters={"required": "x"})]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
    ]
    for change, param in cases:
        assert server.refused(CHAT, **ASK, **change)["param"] == param, change
