# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses interface: items, their events, and what is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from nemo_build.errors import BundleError
from nemo_build.runtime import Engine
from nemo_build.runtime.chat import AnswerParser, Content
from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.server import sse
from nemo_build.runtime.server.answers import Choice
from nemo_build.runtime.server.backend import EngineBackend, Piece
from nemo_build.runtime.server.errors import ApiError
from nemo_build.runtime.server.response_input import messages_of
from nemo_build.runtime.server.response_logprobs import ContentLogprobs
from nemo_build.runtime.stopping import FinishReason

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


def told_of(server: Served, response: dict) -> list[tuple[str, list]]:
    """Each message's text, and the texts of the tokens that its log-probabilities are of."""
    parts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    return [(part["text"], [bytes(t["bytes"]).decode() for t in part["logprobs"]]) for part in parts]


@pytest.mark.parametrize("speculates", [False, True])
def test_logprobs_are_those_of_the_message_alone(server, speculates):
    ask = {"input": "hello", "temperature": 0, "max_output_tokens": 80, "top_logprobs": 1}
    ask["nemo"] = {"speculate": speculates}
    response = server.post(RESPONSES, **ask)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    [(text, tokens)] = told_of(server, response)
    assert len(tokens) > 3
    assert "".join(tokens) == text
    found = events(server, **ask)
    assert found[-1]["response"]["output"][1]["content"] == response["output"][1]["content"]
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert [t for e in deltas for t in e["logprobs"]] == response["output"][1]["content"][0]["logprobs"]
    assert all("".join(t["token"] for t in e["logprobs"]) == e["delta"] for e in deltas)


def test_white_space_that_is_held_back_keeps_its_logprobs(server):
    form = {"guided_regex": "a\n\nd \n b", "reasoning": {"effort": "none"}, "top_logprobs": 0}
    response = server.post(
        RESPONSES, input="hello", temperature=0, **form, include=["message.output_text.logprobs"]
    )
    [(text, tokens)] = told_of(server, response)
    assert text == "a\n\nd \n b"
    assert "".join(tokens) == text


def of_pieces(pieces: list[str], ends: list[int] = (), **options) -> list[tuple[str, list[str]]]:
    """Each run of content, and the pieces that its log-probabilities are of; steps end behind the pieces `ends`."""
    told = ContentLogprobs()
    choice = Choice(0, AnswerParser(**options), told)
    last = len(pieces) - 1
    step, found = [], []
    for i, text in enumerate(pieces):
        reason = FinishReason.LENGTH if i == last else None
        step.append(Piece(text, i, logprobs=TokenLogprobs(i, -1.0, ()), finish_reason=reason))
        if i in ends or i == last:
            runs = [d.text for d in choice.push(step) if isinstance(d, Content)]
            assert len(runs) == len(told.parts)
            found += zip(runs, [[pieces[t.token] for t in part] for part in told.parts], strict=True)
            step = []
    return found


CALL = ["<tool_call>", "\n", "<function=", "f", ">", "\n", "</function>", "\n", "</tool_call>"]
TAKEN_APART = [
    (["I", "I", "</think>", "I", " can"], True, "I can", [3, 4]),
    (["I", "</thi", "nk>I", " can"], True, "I can", [2, 3]),
    (["</think>", "\n\n", "so", "\n", "\n", "and", "\n"], True, "so\n\nand\n", [2, 3, 4, 5, 6]),
    (["so\n", "and", " <", "b", ">"], False, "so\nand <b>", [0, 1, 2, 3, 4]),
    (["so", "", "", "é", "", "!"], False, "soé!", [0, 1, 2, 3, 4, 5]),
    (["so", "\n", *CALL, "\n", "then"], False, "so\n\nthen", [0, 1, 11, 12]),
    (["why", *CALL, "</think>", "so"], True, "so", [11]),
    (["so", *CALL, *CALL], False, "so", [0]),
]


@pytest.mark.parametrize(("pieces", "thinking", "text", "tokens"), TAKEN_APART)
@pytest.mark.parametrize("by", [1, 2, 99])
def test_which_tokens_content_is_of(pieces, thinking, text, tokens, by):
    tools = [{"type": "function", "function": {"name": "f"}}]
    ends = list(range(by - 1, len(pieces), by))
    found = of_pieces(pieces, ends, thinking=thinking, tools=tools)
    assert "".join(run for run, _ in found) == text
    # Which of several that are alike it is of white space around a call is not told from its text.
    assert [piece for _, told in found for piece in told] == [pieces[i] for i in tokens]


def test_content_on_both_sides_of_a_call_has_its_own():
    tools = [{"type": "function", "function": {"name": "f"}}]
    runs = of_pieces(["so", *CALL, "then", " it"], thinking=False, tools=tools)
    assert runs == [("so", ["so"]), ("then it", ["then", " it"])]


class Failing(EngineBackend):
    """An engine that fails before its first token, or behind it; but not the probe."""

    behind = False

    async def stream(self, prompt, params, scheduling, **options):
        if len(prompt) == 1:
            async for piece in super().stream(prompt, params, scheduling, **options):
                yield piece
            return
        if self.behind:
            yield Piece("a", 1, prompt_tokens=1, cached_tokens=0)
        await asyncio.sleep(0.2)
        raise BundleError("The engine fails.")


@pytest.mark.parametrize("behind", [False, True])
def test_a_failure_behind_the_status_ends_a_response(demo_engine_directory, monkeypatch, behind):
    monkeypatch.setattr(sse, "_PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(Failing, "behind", behind)
    with served(Failing(Engine.load(demo_engine_directory, threads=1))) as failing:
        found = events(failing, input="hello", reasoning={"effort": "none"})
        kinds = [e["type"] for e in found]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.failed"
        assert kinds.count("response.created") == 1
        response = found[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"] == {"code": "server_error", "message": "The engine fails."}
        monkeypatch.setattr(sse, "_PATIENCE_SECONDS", 20)
        if not behind:
            answer = failing.client.post(RESPONSES, json={"input": "hello", "stream": True})
            assert answer.status_code == 500


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
