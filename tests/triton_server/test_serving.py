# SPDX-License-Identifier: Apache-2.0
"""OpenAI's interface in front of a real Triton server: two processes, each in the environment that it needs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_build.triton_repo.server import Ports

from .running import Running, children, front_of, nemo_build, options_of, until

ROOT = Path(__file__).parents[2]
COMMAND = next(
    (str(p) for p in (ROOT / ".venv/bin/nemo-build", shutil.which("nemo-build")) if p and Path(p).exists()),
    None,
)
pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="needs .venv with the extra serve beside this environment: scripts/test makes it"
)
ASK = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 10}, "n": {"type": "integer", "maximum": 9}},
    "required": ["word", "n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 9}},
            "required": ["n"],
        },
    },
}


class Api:
    """The OpenAI server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: Any, timeout: float = 60) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def chat(self, **options: Any) -> dict[str, Any]:
        status, found = self.post(
            "/v1/chat/completions", {"model": "demo", "messages": ASK, "temperature": 0} | options
        )
        assert status == 200, found
        return found

    def events(self, path: str, body: Any) -> Iterator[Any]:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body | {"stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def answers(self) -> bool:
        try:
            return self.status("/health") == 200
        except OSError:
            return False

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=70) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code


@contextmanager
def opened(engine: Path, *arguments: str, wait: bool = True) -> Iterator[Api]:
    """`nemo-build serve` in a process of its own; `wait`: until it says that it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [COMMAND, "serve", str(engine), "--port", str(port), "--served-name", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    reader = threading.Thread(target=said.extend, args=(iter(process.stdout.readline, ""),))
    reader.start()
    try:
        api = Api(f"http://127.0.0.1:{port}")
        until(lambda: api.answers() or process.poll() is not None, 60)
        if wait:
            until(lambda: any("is served at" in line for line in said) or process.poll() is not None, 60)
        assert process.poll() is None, "".join(said)
        yield api
    finally:
        process.terminate()
        process.wait(20)
        reader.join(10)
        process.stdout.close()


@pytest.fixture(scope="module")
def local(demo_engine_directory):
    """The engine itself behind the same interface."""
    with opened(demo_engine_directory, "--max-sequences", "4", "--threads", "1") as api:
        yield api


@pytest.fixture(scope="module")
def api(demo_engine_directory, mtp):
    with opened(demo_engine_directory, "--triton", mtp.http) as api:
        yield api


WAYS = {
    "plain": {"max_tokens": 24},
    "thinking": {
        "max_tokens": 40,
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": 6,
    },
    "no thinking": {"max_tokens": 16, "chat_template_kwargs": {"enable_thinking": False}},
    "sampled": {"max_tokens": 24, "temperature": 0.8, "seed": 5, "n": 3},
    "log probabilities": {"max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    "schema": {
        "max_tokens": 60,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        },
    },
    "schema after thinking": {
        "max_tokens": 70,
        "thinking_token_budget": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "call": {
        "max_tokens": 80,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [TOOL],
        "tool_choice": "required",
    },
}


def told(answer: dict[str, Any]) -> list[Any]:
    """What does not depend on the server: ids are new each time, and drafts depend on chance."""
    found = []
    for choice in answer["choices"]:
        message = dict(choice["message"])
        calls = [c["function"] for c in message.pop("tool_calls", None) or ()]
        found.append((message, calls, choice["finish_reason"], choice.get("logprobs")))
    usage = answer["usage"]
    return [*found, usage["prompt_tokens"], usage["completion_tokens"]]


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_the_engine_itself(api, local, way):
    want, got = local.chat(**WAYS[way]), api.chat(**WAYS[way])
    assert told(got) == told(want)


def test_answers_make_sense(api):
    message = api.chat(**WAYS["thinking"])["choices"][0]["message"]
    assert message["reasoning_content"]
    found = api.chat(**WAYS["schema"])["choices"][0]
    assert found["finish_reason"] != "stop" or set(json.loads(found["message"]["content"])) == {"word", "n"}
    [call] = api.chat(**WAYS["call"])["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert isinstance(json.loads(call["function"]["arguments"])["n"], int)


def test_streams(api, mtp):
    body = {"model": "demo", "messages": ASK, "temperature": 0, "nemo": {"tokens": True}}
    events = list(
        api.events(
            "/v1/chat/completions", body | {"max_tokens": 60, "stream_options": {"include_usage": True}}
        )
    )
    whole = api.chat(max_tokens=60)
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    message = whole["choices"][0]["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(d.get(name) or "" for d in deltas) == (message.get(name) or "")
    assert len(deltas) > 4
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    tokens = [t for e in events for t in e.get("nemo", {}).get("tokens", ())]
    assert any(t["drafted"] for t in tokens)
    assert not all(t["drafted"] for t in tokens)


def test_what_it_says_of_itself(api, mtp):
    assert api.status("/health") == api.status("/ready") == 200
    with urllib.request.urlopen(f"{api.url}/nemo/info", timeout=10) as reply:
        info = json.loads(reply.read())
    assert (info["context"], info["sequences"], info["speculator"]) == (1024, 4, "mtp")
    with urllib.request.urlopen(f"{api.url}/metrics", timeout=10) as reply:
        assert b"nemo:" in reply.read()


def test_what_is_wrong_is_said(api, local):
    for body in (
        {"messages": [{"role": "user", "content": "x " * 3000}]},
        {"messages": ASK, "temperature": 1000},
        {"messages": ASK, "logit_bias": {"99999999": 1}},
        {
            "messages": ASK,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
        },
        {"messages": ASK, "guided_regex": "("},
    ):
        status, found = api.post("/v1/chat/completions", {"model": "demo"} | body)
        assert status == 400, found
        assert found == local.post("/v1/chat/completions", {"model": "demo"} | body)[1]


def test_leaving_frees_the_slot(api, mtp: Running):
    body = {"model": "demo", "prompt": "import", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    events = api.events("/v1/completions", body)
    next(events)
    until(lambda: mtp.gauge("requests_running") == 1)
    events.close()
    until(lambda: mtp.gauge("requests_running") == 0, 5)


def test_a_server_that_dies_and_comes_again(demo_engine_directory, tmp_path):
    body = {"model": "demo", "prompt": "import", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    ports = Ports.free()
    options = ["--threads", "1", "--run", "-o", str(tmp_path / "repository"), *options_of(ports)]
    triton = nemo_build("triton", str(demo_engine_directory), *options)
    reader = threading.Thread(target=triton.stdout.read)  # so that the pipe does not fill
    reader.start()
    try:
        with opened(demo_engine_directory, "--triton", f"http://127.0.0.1:{ports.http}", wait=False) as api:
            assert api.status("/health") == 200
            until(lambda: api.status("/ready") == 200, 60)
            events = api.events("/v1/completions", body)
            next(events)
            [server] = children(triton.pid)
            os.kill(front_of(server), signal.SIGKILL)  # which the server does not always survive itself
            start = time.monotonic()
            last = list(events)[-1]
            assert "error" in last, last
            assert time.monotonic() - start < 10
            short = body | {"max_tokens": 2}
            assert api.post("/v1/completions", short)[0] == 503
            until(lambda: api.post("/v1/completions", short)[0] == 200, 60)
            assert api.status("/ready") == 200
            assert api.post("/v1/completions", short)[1]["usage"]["completion_tokens"] == 2
    finally:
        triton.send_signal(signal.SIGINT)
        triton.wait(40)
        reader.join(10)
