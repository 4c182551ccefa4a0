# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses interface: items, their events, and what is refused."""

from __future__ import annotations

import json

import pytest

from nemo_build.runtime import Engine
from nemo_build.runtime.server.backend import EngineBackend
from nemo_build.runtime.server.errors import ApiError
from nemo_build.runtime.server.response_input import messages_of

from .serving import Served, served
from .test_server_structured import SCHEMA, WEATHER

RESPONSES = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def server(demo_engine_directory) -> Served:
    engine = Engine.load(demo_engine_directory, speculate="ngram", threads=1)
    with served(EngineBackend(engine, speculate="ngram")) as found:
        yield found


def events(server: Served, **body) -> list[dict]:
    """The events of a streamed response."""
    with server.client.stream("POST", RESPONSES, json={**body, "stream": True}) as answer:
        answer.read()
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def test_text_and_reasoning(server):
    ask = {"input": "hello", "temperature": 0, "max_output_tokens": 80}
    response = server.post(RESPONSES, **ask)
    assert response["object"] == "response"
    assert response["status"] == "completed"
    reasoning, message = response["output"]
    assert (reasoning["type"], message["type"]) == ("reasoning", "message")
    chat = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=80,
    )
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert reasoning["content"][0]["text"] == chat["choices"][0]["message"]["reasoning"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    found = events(server, **ask)
    kinds = [e["type"] for e in found]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    thought = "".join(e["delta"] for e in found if e["type"] == "response.reasoning_text.delta")
    assert text == message["content"][0]["text"]
    assert thought == reasoning["content"][0]["text"]
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    assert [d["status"] for d in done] == ["completed", "completed"]


def test_a_call(server):
    ask = {"input": "hello", "temperature": 0, "tools": [TOOL], "tool_choice": "required"}
    ask["thinking_token_budget"] = 4
    found = events(server, **ask)
    added = [e["item"] for e in found if e["type"] == "response.output_item.added"]
    assert [i["type"] for i in added][:2] == ["reasoning", "function_call"]
    [*_, done] = [e for e in found if e["type"] == "response.function_call_arguments.done"]
    deltas = [
        e["delta"]
        for e in found
        if e["type"] == "response.function_call_arguments.delta" and e["item_id"] == done["item_id"]
    ]
    assert "".join(deltas) == done["arguments"]
    assert set(json.loads(done["arguments"])) == {"city", "days"}
    call = found[-1]["response"]["output"][1]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *found[-1]["response"]["output"],
        *(
            {"type": "function_call_output", "call_id": i["call_id"], "output": "sunny"}
            for i in found[-1]["response"]["output"]
            if i["type"] == "function_call"
        ),
    ]
    after = server.post(RESPONSES, input=items, tools=[TOOL], temperature=0, max_output_tokens=6)
    assert after["output"]
    named = {"type": "function", "name": call["name"]}
    assert server.post(RESPONSES, **{**ask, "tool_choice": named})["output"][1]["name"] == call["name"]


def test_a_form_and_an_end_too_early(server):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    response = server.post(RESPONSES, input="hello", text=form, reasoning={"effort": "none"}, temperature=0)
    [message] = response["output"]
    assert set(json.loads(message["content"][0]["text"])) == set(SCHEMA["properties"])
    assert response["text"] == form
    cut = server.post(RESPONSES, input="hello", max_output_tokens=2)
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][-1]["status"] == "incomplete"
    assert events(server, input="hello", max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_logprobs_of_items(server):
    found = server.post(
        RESPONSES, input="hello", max_output_tokens=6, reasoning={"effort": "none"}, top_logprobs=2
    )
    logprobs = found["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 6
    assert all(len(t["top_logprobs"]) == 2 for t in logprobs)


def test_what_is_refused(server):
    cases = [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"n": 2}, "n"),
        ({"temperature": 1000}, "temperature"),
    ]
    for change, param in cases:
        assert server.refused(RESPONSES, **{"input": "a", **change})["param"] == param, change


def test_items_to_messages():
    def text(value: str) -> list[dict]:
        return [{"type": "output_text", "text": value}]

    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": text("let me see")},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "function_call_output", "call_id": "2", "output": text("b")},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]
    system, user, first, one, two, second = messages_of(items, "be good")
    assert (system["role"], user["role"]) == ("system", "user")
    assert (first["content"], first["reasoning_content"]) == ("let me see", "hm")
    assert [c["function"]["name"] for c in first["tool_calls"]] == ["f", "g"]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in (one, two)] == [
        ("tool", "1", "a"),
        ("tool", "2", "b"),
    ]
    assert second["tool_calls"][0]["id"] == "3"
    with pytest.raises(ApiError, match="call_id"):
        messages_of([{"type": "function_call", "name": "f", "arguments": "{}"}], None)
