# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: their form, and what must not be in them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime.server import logs
from nemo_build.runtime.server.logs import RequestLine, configuration, request_id, take_request_id

SECRET = "the client's own words"
LOGGER = logging.getLogger("nemo_build.runtime.server.test")
TEXTS = st.text() | st.text(alphabet='a="\\ \n\r\x1c\x85\u2028\ud800', max_size=5)
"""With what ends lines, quotes, or cannot be written."""

LINE = RequestLine(
    "/v1/chat/completions",
    200,
    prompt_tokens=120,
    cached_tokens=100,
    completion_tokens=40,
    reasoning_tokens=0,
    accepted_draft_tokens=21,
    finish_reason="stop",
    first_token_seconds=0.12345678,
    seconds=1.5,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Loggers are as they were, whatever a test configures."""
    names = [None, "nemo_build", "uvicorn", "uvicorn.access", "uvicorn.error"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(log.level, log.handlers[:], log.propagate) for log in loggers]
    token = request_id.set(None)
    yield
    request_id.reset(token)
    for log, (level, handlers, propagate) in zip(loggers, before, strict=True):
        log.level, log.handlers[:], log.propagate = level, handlers, propagate
        log.manager._clear_cache()


def written(monkeypatch, form, act, level="INFO") -> str:
    """What is on standard error after `act`."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logging.config.dictConfig(configuration(form, level))
    act()
    return stream.getvalue()


def test_a_request_as_json(monkeypatch):
    request_id.set("req-1")
    [line] = written(monkeypatch, "json", LINE.write).splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "info",
        "logger": "nemo_build.requests",
        "message": "request",
        "request_id": "req-1",
        "route": "/v1/chat/completions",
        "status": 200,
        "prompt_tokens": 120,
        "cached_tokens": 100,
        "completion_tokens": 40,
        "reasoning_tokens": 0,
        "accepted_draft_tokens": 21,
        "finish_reason": "stop",
        "first_token_seconds": 0.123457,
        "seconds": 1.5,
        "client_aborted": False,
    }


def test_a_request_as_text(monkeypatch):
    request_id.set("req-1")
    line = written(monkeypatch, "text", LINE.write)
    assert line.split(" ", 1)[1] == (
        "INFO    request id=req-1 route=/v1/chat/completions status=200 prompt_tokens=120 cached_tokens=100 "
        "completion_tokens=40 reasoning_tokens=0 accepted_draft_tokens=21 finish_reason=stop "
        "first_token_seconds=0.123457 seconds=1.5 client_aborted=false\n"
    )


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (RequestLine("/health", 200), None),
        (RequestLine("/metrics", 200), None),
        (RequestLine("/ready", 503), "error"),
        (RequestLine("/v1/models", 200), "info"),
        (RequestLine("/v1/models", 404), "info"),
        (RequestLine("/v1/completions", 500, error="RuntimeError"), "error"),
    ],
)
def test_levels(monkeypatch, line, level):
    lines = written(monkeypatch, "json", line.write).splitlines()
    assert [json.loads(found)["level"] for found in lines] == ([] if level is None else [level])


def test_all_is_logged_where_that_is_wanted(monkeypatch):
    text = written(monkeypatch, "text", RequestLine("/health", 200).write, level="DEBUG")
    assert "route=/health" in text


@given(TEXTS)
def test_no_value_makes_another_field_or_line(text):
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", None, None)
    record.fields = {"error": text, "last": 1}
    line = logs.TextFormatter().format(record)
    assert len(line.splitlines()) == 1
    line.encode()
    _, found = line.split(" error=", 1)
    assert found.endswith(" last=1")
    value = found.removesuffix(" last=1")
    assert value == text or json.loads(value) == text
    assert value.startswith('"') or not re.search(r"[\s=]", value)
    assert json.loads(logs.JsonFormatter().format(record))["error"] == text


@given(TEXTS)
def test_a_message_is_one_line(text):
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
    [line] = logs.TextFormatter().format(record).splitlines()
    line.encode()
    [line] = logs.JsonFormatter().format(record).splitlines()
    line.encode()
    assert json.loads(line)["message"] == text


@given(st.text())
def test_ids_are_fit_to_be_written(text):
    found = take_request_id(text)
    assert re.fullmatch(r"[A-Za-z0-9._:/+=-]{1,128}", found)


def test_ids():
    assert take_request_id("7f-1.a:b") == "7f-1.a:b"
    assert take_request_id("x" * 129) != "x" * 129
    assert take_request_id(None) != take_request_id(None)


def raise_chained(outer: Exception, inner: Exception) -> None:
    try:
        try:
            raise inner
        except Exception as error:
            raise outer from error
    except Exception:
        LOGGER.exception("a request failed")


@pytest.mark.parametrize("form", logs.FORMATS)
def test_exceptions_of_a_request_do_not_quote_it(monkeypatch, form):
    request_id.set("req-1")
    text = written(monkeypatch, form, lambda: raise_chained(RequestError(SECRET), KeyError(SECRET)))
    assert SECRET not in text
    assert "req-1" in text
    assert "KeyError" in text
    assert "RequestError" in text
    assert "raise_chained" in text


@pytest.mark.parametrize("form", logs.FORMATS)
def test_what_the_engine_says_is_shown(monkeypatch, form):
    request_id.set("req-1")
    engine = BundleError("The engine fails: out of memory")
    assert "out of memory" in written(monkeypatch, form, lambda: raise_chained(engine, ValueError(SECRET)))
    request_id.set(None)
    text = written(
        monkeypatch, form, lambda: raise_chained(RuntimeError("at start"), OSError("no such device"))
    )
    assert "at start" in text
    assert "no such device" in text


def test_an_exception_is_one_object_of_json(monkeypatch):
    text = written(monkeypatch, "json", lambda: raise_chained(RuntimeError("a\nb"), OSError("c")))
    [line] = text.splitlines()
    assert json.loads(line)["exception"].endswith("RuntimeError: a\nb")


def test_tasks_have_ids_of_their_own(monkeypatch):
    async def serve(name: str) -> None:
        request_id.set(name)
        await asyncio.sleep(0)
        RequestLine(f"/{name}", 200).write()

    async def main() -> None:
        await asyncio.gather(*(serve(f"r{i}") for i in range(5)))

    lines = [json.loads(x) for x in written(monkeypatch, "json", lambda: asyncio.run(main())).splitlines()]
    assert {line["route"] for line in lines} == {f"/r{i}" for i in range(5)}
    assert all(line["route"] == "/" + line["request_id"] for line in lines)


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "ERROR"])
def test_uvicorn_writes_in_the_same_form_and_no_access_lines(monkeypatch, level):
    """With a real server: a path with a key in its query, and headers; whatever was configured before."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    logging.config.dictConfig(uvicorn.config.LOGGING_CONFIG)

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        raise RuntimeError("behind the answer")

    def act() -> None:
        config = uvicorn.Config(
            app, port=0, lifespan="off", log_level=None, log_config=configuration("json", level)
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1/models?api_key=sk-secret"
        asked = urllib.request.Request(url, headers={"Authorization": "Bearer sk-secret"})
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(asked)
        server.should_exit = True
        thread.join()

    lines = [json.loads(line) for line in written(monkeypatch, "json", act, level).splitlines()]
    assert "sk-secret" not in json.dumps(lines)
    assert {line["logger"] for line in lines} == {"uvicorn.error"}
    [failure] = [line for line in lines if "exception" in line]
    assert "RuntimeError: behind the answer" in failure["exception"]
    assert any("running on" in line["message"] for line in lines) == (level != "ERROR")
