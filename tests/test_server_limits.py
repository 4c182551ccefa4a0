# SPDX-License-Identifier: Apache-2.0
"""Keys, room, other origins, request ids; clients that leave; and how a server ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncGenerator

import httpx
import pytest
from click.testing import CliRunner

from nemo_build.errors import BundleError
from nemo_build.runtime import Engine
from nemo_build.runtime.server.backend import EngineBackend, Piece
from nemo_build.runtime.server.context import Settings

from .serving import served

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
STEP = 0.004
LONG = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory, max_sequences=2, threads=1)


@pytest.fixture(scope="module")
def slow(demo_engine_directory) -> Engine:
    """An engine that takes some milliseconds a step, so that much can happen meanwhile."""
    engine = Engine.load(demo_engine_directory, max_sequences=2, threads=1)
    step = engine.session.step

    def slow_step(batch):
        time.sleep(STEP)
        return step(batch)

    engine.session.step = slow_step
    return engine


class FailingBackend(EngineBackend):
    """The engine, which fails after some tokens."""

    error: Exception = BundleError("The engine fails: of a sudden")

    async def stream(self, *args, **kwargs) -> AsyncGenerator[Piece, None]:
        stream = super().stream(*args, **kwargs)
        try:
            count = 0
            async for piece in stream:
                yield piece
                count += 1
                if count == 30:
                    raise self.error
        finally:
            await stream.aclose()


def test_keys(engine):
    with served(EngineBackend(engine), Settings(keys=("first key", "Schlüssel"))) as server:
        for path in ("/v1/models", "/metrics", "/nemo/info", "/openapi.json"):
            answer = server.client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "missing_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/version", "/", "/page/page.js"):
            assert server.client.get(path).status_code == 200, path
        for key in ("first key", "Schlüssel"):
            given = {"Authorization": f"Bearer {key}".encode()}
            assert server.client.get("/v1/models", headers=given).status_code == 200
        for given in (
            b"Bearer other",
            b"Bearer",
            b"Basic first key",
            b"Bearer first key2",
            b"Bearer \xff\xfe",
        ):
            answer = server.client.get("/v1/models", headers={"Authorization": given})
            assert answer.status_code == 401, given
        assert server.client.post(CHAT, content=b"{").status_code == 401


def test_other_origins(engine):
    given = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with served(EngineBackend(engine), Settings(origins=("https://a.example",), keys=("k",))) as server:
        asked = server.client.options(CHAT, headers=given)
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        refused = server.client.post(CHAT, json={}, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = server.client.options(CHAT, headers={**given, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
    with served(EngineBackend(engine)) as server:
        assert "access-control-allow-origin" not in server.client.get("/health", headers=given).headers


LOCAL = (
    "http://localhost:8000",
    "http://LOCALHOST",
    "http://127.0.0.1:8000",
    "http://127.1.2.3",
    "http://[::1]:8000",
)
FOREIGN = (
    "http://evil.example",
    "http://localhost.evil.example:8000",
    "http://127.0.0.1.evil.example",
    "http://192.168.0.1",
    "https://a.example.org",
    "http://[::1",
    "null",
    "",
)


def test_pages_of_other_hosts_may_not_call_a_local_server_without_keys(engine):
    """A name of theirs that leads to the loopback address makes them pages of this server to a browser."""

    def status(server, origin, path=COMPLETE) -> int:
        headers = {"Origin": origin, "Host": "evil.example"}
        answer = server.client.post(path, json={"prompt": "a", "max_tokens": 1}, headers=headers)
        if answer.status_code == 403:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "origin_not_allowed")
        return answer.status_code

    given = Settings(is_local=True, origins=("https://a.example",))
    with served(EngineBackend(engine), given) as server:
        assert [status(server, origin) for origin in (*LOCAL, "https://a.example")] == [200] * 6
        assert [status(server, origin) for origin in FOREIGN] == [403] * len(FOREIGN)
        assert server.client.get("/metrics", headers={"Origin": FOREIGN[0]}).status_code == 403
        assert server.client.get("/metrics").status_code == 200
    for other, want in (
        (Settings(), 200),
        (Settings(is_local=True, origins=("*",)), 200),
        (Settings(is_local=True, keys=("k",)), 401),
    ):
        with served(EngineBackend(engine), other) as server:
            assert status(server, FOREIGN[0]) == want


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_the_command_says_whether_the_server_is_local(monkeypatch, tmp_path, host, is_local):
    from nemo_build.cli import serve
    from nemo_build.runtime.server import app, logs

    found = []

    def create_app(backend, settings):
        found.append(settings)
        raise BundleError("that is all")

    monkeypatch.setattr(serve, "_backend", lambda *_: None)
    monkeypatch.setattr(app, "create_app", create_app)
    monkeypatch.setattr(logs, "configuration", lambda _: {"version": 1, "incremental": True})
    assert CliRunner().invoke(serve.command, [str(tmp_path), "--host", host, "--port", "0"]).exit_code != 0
    assert [settings.is_local for settings in found] == [is_local]


def test_request_ids_and_lines(engine, caplog):
    caplog.set_level("INFO", "nemo_build.requests")
    with served(EngineBackend(engine)) as server:
        given = {"X-Request-Id": "mine-1"}
        assert server.client.get("/health", headers=given).headers["x-request-id"] == "mine-1"
        made = server.client.get("/health", headers={"X-Request-Id": "bad id"}).headers["x-request-id"]
        assert made.startswith("req-")
        server.client.post(COMPLETE, json={"prompt": "secret", "max_tokens": 3, "ignore_eos": True})
        server.client.post(COMPLETE, json={"prompt": "secret", "max_tokens": 0})
        server.client.get("/nowhere")
    lines = [r.fields for r in caplog.records if r.name == "nemo_build.requests"]
    done, wrong, nowhere = (line for line in lines if line["route"] not in ("/health", "/ready"))
    assert (done["route"], done["status"], done["completion_tokens"]) == (COMPLETE, 200, 3)
    assert done["finish_reason"] == "length"
    assert done["first_token_seconds"] <= done["seconds"]
    assert (wrong["status"], nowhere["status"], nowhere["route"]) == (400, 404, "(none)")
    assert "secret" not in caplog.text


def test_too_many_requests(slow):
    with served(EngineBackend(slow), Settings(max_waiting=1)) as server:
        with (
            server.client.stream("POST", CHAT, json={**LONG, "n": 2, "stream": True}) as first,
            server.client.stream("POST", CHAT, json={**LONG, "stream": True}) as second,
        ):
            lines = first.iter_lines(), second.iter_lines()
            next(lines[0])
            answer = server.client.post(COMPLETE, json={"prompt": "a"})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) > 0
            streamed = server.client.post(CHAT, json={**LONG, "stream": True})
            assert streamed.status_code == 429
            assert server.client.get("/health").status_code == 200
            assert server.client.get("/ready").status_code == 200
        assert server.idle()
        assert server.client.post(COMPLETE, json={"prompt": "a", "n": 3}).status_code == 200
        for path, body in ((COMPLETE, {"prompt": ["a", "b"], "n": 2}), (CHAT, {**LONG, "n": 4})):
            never = server.client.post(path, json=body)
            assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
            assert "3 answers" in never.json()["error"]["message"]


def test_an_engine_that_fails(engine):
    with served(FailingBackend(engine)) as server:
        answer = server.client.post(CHAT, json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        streamed = server.client.post(CHAT, json={**LONG, "stream": True})
        assert streamed.status_code == 200
        *_, last, nothing = streamed.text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
        assert nothing == ""
        response = server.client.post(
            "/v1/responses", json={"input": "a", "stream": True, "ignore_eos": True}
        )
        last = response.text.strip().split("\n\n")[-1].split("\n")[1]
        assert json.loads(last.removeprefix("data: "))["type"] == "response.failed"
        assert server.idle()


def test_a_defect(engine, caplog):
    backend = FailingBackend(engine)
    backend.error = ZeroDivisionError("what the client sent")
    with served(backend) as server:
        for stream in (True, False):
            given = {"X-Request-Id": "mine"}
            answer = server.client.post(CHAT, json={**LONG, "stream": stream}, headers=given)
            assert "what the client sent" not in answer.text
            assert "internal_error" in answer.text
            assert answer.headers["x-request-id"] == "mine"
        assert answer.status_code == 500
        assert (
            'request_errors_total{model_name="engine",status="500"} 1.0' in server.client.get("/metrics").text
        )
    assert any(r.exc_info and r.exc_info[0] is ZeroDivisionError for r in caplog.records)


def test_timeouts(slow):
    with served(EngineBackend(slow), Settings(timeout=0.4)) as server:
        for change, most in (({}, 0.4), ({"timeout": 0.1}, 0.1), ({"timeout": 100}, 0.4)):
            answer = server.post(CHAT, **LONG, **change)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] <= most / STEP


def leave(url: str, body: dict) -> None:
    """Ask for something, read for a while if there is something to read, and close the connection."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        if body["stream"]:
            assert b" 200 OK" in connection.recv(4096)
        time.sleep(0.2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(slow, stream):
    with served(EngineBackend(slow)) as server:
        for _ in range(3):
            leave(server.url, {**LONG, "stream": stream})
            steps = server.backend.statistics().scheduler.steps
            assert server.idle(5)
            # One was under way, some more went by until the connection was found closed: 5 ms of a step each.
            assert server.backend.statistics().scheduler.steps - steps < 20
        assert server.server._context.gate.active == 0
        text = server.client.get("/metrics").text
    [aborted] = [line for line in text.splitlines() if line.startswith("nemo:request_aborted_total{")]
    assert float(aborted.split()[-1]) == 3


def test_readiness_asks_for_a_token_or_believes_steps(engine):
    checks = []

    class Counting(EngineBackend):
        broken = True

        async def check(self) -> None:
            checks.append(1)
            if self.broken:
                self.broken = False
                raise BundleError("no")
            await super().check()

    backend = Counting(engine)
    with served(backend) as server:
        readiness = server.server._readiness
        assert len(checks) == 2  # to warm up, which went wrong at first
        assert server.client.get("/ready").status_code == 200
        assert len(checks) == 2  # that was just now
        readiness._proved -= 100
        assert server.client.get("/ready").status_code == 200
        assert len(checks) == 3
        readiness._proved -= 100
        backend.broken = True
        answer = server.client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert server.client.get("/ready").status_code == 200


def test_what_runs_may_end_and_nothing_new_begins(slow):
    with served(EngineBackend(slow), drain_seconds=20) as server:
        answers: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            body = {**LONG, "max_tokens": 120, "stream": stream}
            answers.append(httpx.post(server.url + CHAT, json=body, timeout=60))

        threads = [threading.Thread(target=ask, args=[stream]) for stream in (True, False)]
        for thread in threads:
            thread.start()
        while server.server._context.gate.active < 2:
            time.sleep(0.01)
        server.server.stop()
        refused = server.client.post(COMPLETE, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        for thread in threads:
            thread.join(30)
        assert [a.status_code for a in answers] == [200, 200]
        [streamed] = [a for a in answers if a.headers["content-type"].startswith("text/event-stream")]
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_what_takes_too_long_gets_an_error_at_the_end(slow):
    with served(EngineBackend(slow), drain_seconds=0.2) as server:
        answers: list[httpx.Response] = []

        def ask(path: str, stream: bool) -> None:
            body = {**LONG, "stream": stream, "input": "a", "prompt": "a"}
            answers.append(httpx.post(server.url + path, json=body, timeout=60))

        paths = (CHAT, True), (CHAT, False)
        threads = [threading.Thread(target=ask, args=arguments) for arguments in paths]
        for thread in threads:
            thread.start()
        while server.server._context.gate.active < 2:
            time.sleep(0.01)
        time.sleep(0.2)
        server.server.stop()
        for thread in threads:
            thread.join(30)
    assert len(answers) == 2
    by_status = {a.status_code: a for a in answers}
    assert by_status[503].json()["error"]["code"] == "unavailable"
    last = by_status[200].text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert slow.statistics().free_slots == 2
