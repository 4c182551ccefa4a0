# SPDX-License-Identifier: Apache-2.0
"""``nemo-build serve`` as a process: what it prints, how it is ended, how it fails."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from click.testing import CliRunner

from nemo_build.cli import cli
from nemo_build.errors import UserError

from .serving import process

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG = {"messages": HELLO, "max_tokens": 250, "ignore_eos": True, "temperature": 1.0, "stream": True}


def test_help_imports_nothing_of_the_server():
    code = (
        "import sys; from nemo_build.cli import cli; cli.main(['serve', '--help'], standalone_mode=False);"
        "heavy = {'numpy', 'onnx', 'fastapi', 'starlette', 'uvicorn', 'pydantic', 'llguidance', 'tokenizers'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--triton" in done.stdout


def test_it_names_what_is_missing(monkeypatch, demo_engine_directory):
    monkeypatch.setattr("nemo_build.cli.serve._NEEDS", ("fastapi", "not_there"))
    with pytest.raises(UserError, match=r"not_there(.|\n)*nemo-build\[serve\]"):
        CliRunner().invoke(cli, ["serve", str(demo_engine_directory)], catch_exceptions=False)


def test_wrong_usage(tmp_path, demo_engine_directory):
    def refused(*options: object) -> str:
        words = ["serve", str(demo_engine_directory), "--port", "0", *map(str, options)]
        with pytest.raises(UserError) as found:
            CliRunner().invoke(cli, words, catch_exceptions=False)
        return str(found.value)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Cannot listen at 127.0.0.1" in refused("--port", taken.getsockname()[1])
    assert "Cannot listen" in refused("--host", "no.such.host.invalid")
    empty = tmp_path / "keys"
    empty.write_text("# none\n\n")
    assert "has no API key" in refused("--api-key-file", empty)
    assert "no speculator" in refused("--speculate", "magic")
    assert "metrics" in refused("--metrics-alias", "other")
    with pytest.raises(UserError):
        CliRunner().invoke(cli, ["serve", str(tmp_path / "nothing")], catch_exceptions=False)


def test_options_of_an_engine_are_refused_with_triton(tmp_path):
    words = ["serve", str(tmp_path), "--triton", "http://localhost:1", "--threads", "2", "--speculate", "mtp"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "--speculate, --threads are the Triton server's business" in result.output


def test_it_serves_as_told(tmp_path, demo_engine_directory):
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nfrom the file\n")
    options = ["--served-name", "mine", "--api-key", "given", "--api-key-file", keys, "--log-format", "json"]
    options += ["--speculate", "auto", "--max-sequences", 2, "--max-context", 512, "--prefix-cache", "8M"]
    options += ["--max-request-bytes", "1K", "--cors-origin", "*", "--threads", 1, "--metrics-alias", "vllm"]
    log = tmp_path / "log"
    with process(demo_engine_directory, *options, log=log) as (running, url):
        assert url.startswith("http://127.0.0.1:")
        for key in ("given", "from the file"):
            given = {"Authorization": f"Bearer {key}"}
            info = httpx.get(f"{url}/nemo/info", headers=given).json()
            assert (info["model"], info["context"], info["sequences"]) == ("mine", 512, 2)
            assert info["speculator"] == "dspark"
        assert httpx.get(f"{url}/nemo/info").status_code == 401
        body = {"prompt": "x" * 2000}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=given).status_code == 413
        assert "vllm:" in httpx.get(f"{url}/metrics", headers=given).text
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"/nemo/info", "/v1/completions"} <= {line.get("route") for line in lines}
    assert "given" not in log.read_text()


@pytest.mark.parametrize("seconds", [30, 0.1])
def test_the_end_under_load(tmp_path, demo_engine_directory, seconds):
    """After SIGTERM each client has a whole answer, an error that says so, or no connection at all."""
    ends: list[str] = []

    def ask(url: str, i: int) -> None:
        while "unavailable" not in ends:
            body = {**LONG, "seed": i, "stream": i % 3 != 0}
            try:
                answer = httpx.post(url + CHAT, json=body, timeout=60)
            except httpx.ConnectError:
                return
            except httpx.TransportError as error:
                ends.append(repr(error))
                return
            ends.append(end_of(answer))

    options = ["--drain-seconds", seconds, "--max-sequences", 2, "--threads", 1]
    with process(demo_engine_directory, *options, log=tmp_path / "log") as (running, url):
        threads = [threading.Thread(target=ask, args=[url, i]) for i in range(8)]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        while len(ends) < 3 and time.monotonic() < start + 60:
            time.sleep(0.01)
        start = time.monotonic()
        running.terminate()
        assert running.wait(60) == 0
        assert time.monotonic() - start < seconds + 20
        for thread in threads:
            thread.join(60)
    assert set(ends) <= {"whole", "unavailable"}
    assert ends.count("whole") >= 3
    assert "unavailable" in ends
    assert "Traceback" not in (tmp_path / "log").read_text()


def end_of(answer: httpx.Response) -> str:
    """How an answer ended: whole, or with which error."""
    if answer.status_code != 200:
        return answer.json()["error"]["code"]
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "whole" if answer.json()["choices"][0]["finish_reason"] == "length" else "cut"
    *_, last, nothing = answer.text.split("\n\n")
    assert nothing == ""
    if last == "data: [DONE]":
        return "whole"
    return json.loads(last.removeprefix("data: "))["error"]["code"]
