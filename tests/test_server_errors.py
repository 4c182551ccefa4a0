# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends, it gets an answer in OpenAI's form, and never a 500."""

from __future__ import annotations

import json
import socket
import tracemalloc

import pydantic
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from nemo_build.errors import BundleError, RequestError, UserError
from nemo_build.runtime import Engine
from nemo_build.runtime.chat import ChatTemplate
from nemo_build.runtime.server import asking
from nemo_build.runtime.server.backend import BusyError, EngineBackend
from nemo_build.runtime.server.errors import as_api_error
from nemo_build.runtime.server.schemas.chat import ChatRequest
from nemo_build.runtime.server.schemas.completions import CompletionRequest
from nemo_build.runtime.server.schemas.responses import ResponsesRequest

from .serving import Served, served

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
POSTS = (CHAT, COMPLETE, "/v1/responses", "/tokenize", "/detokenize")
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server(demo_engine_directory) -> Served:
    from nemo_build.runtime.server.context import Settings

    engine = Engine.load(demo_engine_directory, threads=1)
    with served(EngineBackend(engine), Settings(max_request_bytes=LIMIT)) as found:
        yield found
        assert found.idle()


def sent(server: Served, path: str, data: bytes, **headers: str) -> tuple[int, dict]:
    """Status and error of an answer to raw bytes."""
    answer = server.client.post(path, content=data, headers={"content-type": "application/json", **headers})
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return answer.status_code, error


BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "invalid UTF-8": b'{"messages": "\xff\xfe"}',
    "UTF-16": '{"messages": 1}'.encode("utf-16"),
    "a great exponent": b'{"temperature": 1e400, "messages": [], "prompt": "a", "input": "a"}',
    "a great integer": b'{"seed": 1' + b"0" * 400 + b', "prompt": "a", "input": "a", "tokens": [1]}',
    "a huge integer": b'{"seed": 1' + b"0" * 9000 + b"}",
    "NaN": b'{"temperature": NaN, "prompt": "a"}',
    "infinity": b'{"x": [-Infinity]}',
    "deep lists": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "half a pair": b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800", "input": "\\ud800"}',
    "half a pair in a name": b'{"\\ud800": 1}',
    "a null byte": b'{"messages": "\\u0000"}',
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES.keys())
def test_malformed_bodies(server, path, data):
    if "tokenize" in path and b"tokens" in data:
        pytest.skip("an unknown member, whatever its value, is ignored")
    status, error = sent(server, path, data)
    assert status == 400, error


def deep(levels: int) -> dict:
    """An object in an object in an object …"""
    found: dict = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize("levels", [100, 400, 900])
@pytest.mark.parametrize(
    "member",
    [
        lambda d: {"messages": [{"role": "user", "content": "x", "more": d}]},
        lambda d: {"messages": [{"role": "user", "content": [d]}]},
        lambda d: {"messages": HELLO, "chat_template_kwargs": d},
        lambda d: {"messages": HELLO, "guided_json": d, "enable_thinking": False},
        lambda d: {
            "messages": HELLO,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": d}}],
            "tool_choice": "required",
        },
        lambda d: {"messages": HELLO, "unknown": d},
        lambda d: {"messages": HELLO, "metadata": d},
    ],
    ids=["message", "content", "template", "schema", "tool", "unknown", "metadata"],
)
def test_deep_members(server, levels, member):
    answer = server.client.post(CHAT, json={**member(deep(levels)), "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text


WRONG = [
    ("temperature", ["0.5", True, -1, 101, [], {}]),
    ("top_p", [-0.1, 1.1, "1"]),
    ("top_k", [-2, 1.5, "3", 10**30]),
    ("n", [0, 65, 1.5, True]),
    ("max_tokens", [0, -1, "5", 1.5]),
    ("min_tokens", [-1]),
    ("seed", [1.5, 2**64, -(2**63) - 1]),
    ("stop", [1, ["a"] * 5, [""], "", [1]]),
    ("logit_bias", [{"a": 1}, {"1": 101}, {"-1": 1}, [1], {"99999999": 1}, {"1" * 30: 1}]),
    ("stop_token_ids", [[-1], "a", [10**9]]),
    ("presence_penalty", [3, -2.1]),
    ("stream", ["true", 1]),
    ("logprobs", [-1, 21, "yes"]),
    ("user", [5]),
    ("priority", [10**9, "high"]),
    ("timeout", [0, -1]),
    ("nemo", [1, {"tokens": "yes"}]),
    ("response_format", ["json", {}, {"type": "yaml"}]),
]


@pytest.mark.parametrize(("name", "values"), WRONG, ids=[name for name, _ in WRONG])
def test_wrong_members_are_named(server, name, values):
    for value in values:
        error = server.refused(COMPLETE, **{"prompt": "a", name: value})
        assert (error["param"] or "").split(".")[0].split("[")[0] == name, (value, error)


def test_wrong_messages_are_named(server):
    cases = [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([*HELLO, {"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[1].tool_calls[0]"),
    ]
    for messages, param in cases:
        error = server.refused(CHAT, messages=messages)
        assert error["param"] == param, error
    assert server.refused(CHAT, messages=HELLO, top_logprobs=2)["param"] == "top_logprobs"
    assert server.refused(CHAT, messages=HELLO, reasoning_effort="enormous")["param"] == "reasoning_effort"
    assert server.refused(CHAT, messages=HELLO, chat_template_kwargs={"tools": []})["param"]
    assert server.refused(CHAT, messages=HELLO, chat_template_kwargs={"thinking_budget": -1})["param"]
    assert server.refused(CHAT)["param"] == "messages"
    continued = server.refused(CHAT, messages=HELLO, continue_final_message=True)
    assert continued["param"] == "continue_final_message"


def test_unknown_members_are_ignored_and_logged_once(server, caplog):
    for _ in range(2):
        server.post(COMPLETE, prompt="a", max_tokens=1, temprature=0, nemo={"token": True})
    found = [r.getMessage() for r in caplog.records if "means nothing" in r.getMessage()]
    assert len([m for m in found if "'temprature'" in m]) == 1
    assert len([m for m in found if "'nemo.token'" in m]) == 1


def test_paths_methods_and_types(server):
    get = server.client.get
    assert get("/nothing").status_code == 404
    assert len(get("/" + "n" * 20_000).json()["error"]["message"]) < 1000
    assert get("/nothing").json()["error"]["type"] == "not_found_error"
    assert get(CHAT).status_code == 405
    assert server.client.delete("/v1/models").status_code == 405
    assert server.client.delete("/v1/models").json()["error"]["message"]
    plain = server.client.post(CHAT, content=b"messages", headers={"content-type": "text/plain"})
    assert plain.status_code == 400


def test_sizes(server):
    status, error = sent(server, CHAT, b" " * (LIMIT + 1))
    assert (status, error["code"]) == (413, "request_too_large")
    # Without an announcement it is found out on the way.
    answer = server.client.post(CHAT, content=iter([b" " * 65536] * 40))
    assert answer.status_code == 413
    long = "x" * (LIMIT - 200)
    for path, body in (
        (COMPLETE, {"prompt": long}),
        (COMPLETE, {"prompt": long[:-1] + "\ud800"}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
    ):
        status, error = sent(server, path, json.dumps(body).encode())
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "at least" in error["message"]  # it was not tokenized


def named(count: int) -> list[dict]:
    """Tools."""
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


TOO_MUCH = {
    "stop": [{"stop": "x" * 1025}, {"stop": ["a", "x" * 1025]}],
    "stop_token_ids": [{"stop_token_ids": [1] * 1025}],
    "logit_bias": [{"logit_bias": {str(i): 1 for i in range(1025)}}, {"logit_bias": {"1" * 1025: 1}}],
    "messages": [
        {"messages": HELLO * 16_385},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 1025}]},
    ],
    "tools": [{"tools": named(1025)}],
    "guided_choice": [{"guided_choice": ["a"] * 16_385}, {"guided_choice": ["a" * 262_145]}],
    "guided_json": [{"guided_json": "1" * 262_145}],
    "guided_regex": [{"guided_regex": "1" * 262_145}],
    "guided_grammar": [{"guided_grammar": "1" * 262_145}],
    "model": [{"model": "m" * 1025}],
    "user": [{"user": "m" * 1025}],
    "cache_salt": [{"cache_salt": "m" * 1025}],
    "reasoning_effort": [{"reasoning_effort": "m" * 1025}],
    "metadata": [{"metadata": {str(i): 1 for i in range(65)}}],
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_lists_and_texts_have_bounds(server, name):
    for change in TOO_MUCH[name]:
        error = server.refused(CHAT, **{"messages": HELLO, "max_tokens": 1, **change})
        assert error["param"].split("[")[0].split(".")[0] == name, error
        assert len(error["message"]) < 2000


def test_what_is_just_within_bounds(server):
    change = {
        "stop": ["x" * 1024] * 4,
        "stop_token_ids": [1] * 1024,
        "logit_bias": {str(i): 0 for i in range(1024)},
        "user": "m" * 1024,
        "tools": named(1024),
        "tool_choice": "none",
    }
    assert server.post(CHAT, messages=HELLO, max_tokens=1, **change)["choices"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * 10_000},
        {"messages": HELLO, "stop_token_ids": [-1] * 1000},
        {"messages": HELLO, "logit_bias": dict.fromkeys(map(str, range(100_000)), "x")},
        {"messages": HELLO, "tools": [{}] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"prompt": [[]] * 100_000},
        {"prompt": [{}] * 100_000},
        {"prompt": [["a"] * 1000] * 60},
        {"input": [1] * 10_000},
        {"input": HELLO, "tools": [{}] * 1000},
    ],
    ids=lambda b: ",".join(b),
)
def test_the_check_of_a_list_ends_at_what_is_wrong(body):
    kind = ChatRequest if "messages" in body else CompletionRequest if "prompt" in body else ResponsesRequest
    with pytest.raises(pydantic.ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 10


def test_problems_of_messages_end_somewhere():
    with pytest.raises(RequestError) as found:
        ChatTemplate("").render([{"role": "user"}] * 1000)
    assert 20 < len(found.value.problems) < 100


def test_names_within_names_take_no_memory():
    nested: dict = {}
    for _ in range(150):
        nested = {"x" * 50_000: nested}
    tracemalloc.start()
    try:
        assert ChatTemplate("{{ x is defined }}").render(HELLO, x=nested) == "True"
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(RequestError, match=r"x\.a\[1\]\.b is no JSON value but a set"):
        ChatTemplate("").render(HELLO, x={"a": [1, {"b": set()}]})


def test_long_names_of_members_are_not_kept(server):
    server.post(COMPLETE, prompt="a", max_tokens=1, **{"q" * 200_000: 1})
    assert max(map(len, asking._logged)) <= 100


def test_what_is_no_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        assert b" 500 " not in answer.split(b"\r\n")[0]
    assert server.client.get("/health").status_code == 200


def test_errors_of_the_engine():
    headline = as_api_error(BundleError("The engine fails: x", ["secret"]))
    assert (headline.status, headline.code) == (500, "engine_error")
    assert "secret" not in headline.message
    assert as_api_error(UserError("x")).status == 500
    assert as_api_error(BusyError()).status == 429
    assert "Retry-After" in as_api_error(BusyError()).headers
    assert as_api_error(ConnectionRefusedError("x")).status == 503
    assert as_api_error(TimeoutError()).status == 503
    unexpected = as_api_error(ZeroDivisionError("secret"))
    assert (unexpected.status, unexpected.code) == (500, "internal_error")
    assert "secret" not in unexpected.message
    wrong = as_api_error(RequestError("Wrong.", ["messages[2].role must be x", "b"], "Mend it."))
    assert (wrong.status, wrong.param) == (400, "messages[2].role")
    assert wrong.message == "Wrong. messages[2].role must be x; b Mend it."
    many = as_api_error(RequestError("y" * 10_000, [f"stop_token_ids {'x' * 100_000}"] * 50_000))
    assert many.message.endswith("; and 49992 more")
    assert len(many.message) < 5000
    assert len(as_api_error(RequestError("Wrong.", ["a." * 100_000])).param) < 1000


# --- whatever follows from the server's own description ---------------------------------------------------------


@pytest.fixture(scope="module")
def description(server) -> dict:
    """The server's OpenAPI document."""
    return server.client.get("/openapi.json").json()


def test_the_description_is_whole(description):
    assert set(description["paths"]) >= {*POSTS, "/v1/models", "/health", "/ready", "/metrics"}
    for path in description["paths"].values():
        for operation in path.values():
            assert set(operation["responses"]) == {"200", "default"}


_BOUNDED = settings(
    max_examples=20,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # what fails is short enough
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_of_the_description(server, description, path, mode):
    """Schemathesis makes bodies that are as described, and bodies that are not."""
    operation = schemathesis.openapi.from_dict(description)[path]["POST"]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

    @given(strategy)
    @settings(_BOUNDED)
    def check(case):
        if isinstance(case.body, dict):  # short ones do as well
            case.body |= {name: 1 for name in ("max_tokens", "max_output_tokens") if name in case.body}
            case.body["timeout"] = 5
        answer = case.call(base_url=server.url, timeout=30)
        assert answer.status_code in (200, 400, 404, 413), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["content-type"] == ["application/json"]

    check()
