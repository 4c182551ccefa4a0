# SPDX-License-Identifier: Apache-2.0
"""``nemo-build triton`` and what it asks of a server, which a few lines stand in for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from nemo_build.errors import UserError
from nemo_build.runtime.triton_client import TritonClient, TritonError
from nemo_build.triton_repo import render
from nemo_build.triton_repo.control import Control
from nemo_build.triton_repo.render import versions


class Server(ThreadingHTTPServer):
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.address = f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        status, content = self.server.answers.get(self.path, (404, b'{"error": "it is not there"}'))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def server():
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def run(*arguments: str):
    from nemo_build.cli import cli

    return CliRunner().invoke(cli, ["triton", *arguments])


GENERATE = "/v2/models/generate/generate"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b'{"text_output": "a", "finish_reason": "length"}'), None),
        ((200, b'{"text_output": "", "finish_reason": "timeout"}'), None),
        ((503, b'{"error": "busy: 256 requests wait already"}'), None),
        ((400, b'{"error": "busy: 256 requests wait already"}'), None),
        ((200, b'{"error": "generate expects model to produce exactly 1 response"}'), "exactly 1"),
        ((400, b'{"error": "Stub process \'generate_0_0\' is not healthy."}'), "not healthy"),
        ((503, b'{"error": "the model is not ready"}'), "not ready"),
        ((500, b"<html>"), "<html>"),
        ((200, b"<html>"), "does not answer"),
    ],
)
def test_probes(server, answer, said):
    server.answers[GENERATE] = answer
    problem = Control(server.address).probe(5)
    result = run("--probe", server.address)
    if said is None:
        assert problem is None
        assert result.exit_code == 0
    else:
        assert said in (problem or "")
        assert isinstance(result.exception, UserError)


def test_a_probe_of_nothing(server):
    assert "does not answer" in (Control("127.0.0.1:1").probe(2) or "")
    assert not Control("127.0.0.1:1").ready()


def test_the_command_is_quick_and_needs_little():
    code = (
        "import sys; from nemo_build.cli import main\n"
        "try: main(['triton', '--probe', '127.0.0.1:1'])\n"
        "except SystemExit as e: print(e.code, [m for m in sys.modules if m in ('numpy', 'onnxruntime', 'onnx')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "1 []"


def test_repositories(demo_engine_directory, tmp_path):
    engine, out = str(demo_engine_directory), tmp_path / "repository"
    options = ["--speculate", "mtp", "--draft-len", "2", "--prefix-cache", "3M", "--max-waiting", "9"]
    result = run(engine, "-o", str(out), *options, "--max-sequences", "2", "--token-budget", "64")
    assert result.exit_code == 0, result.output
    assert "--load-model=draft_mtp --load-model=verify --load-model=accept" in result.output
    settings = versions(out)[1]
    asked = {"speculate": "mtp", "draft_length": 2, "prefix_cache": 3 << 20, "max_sequences": 2}
    assert asked.items() <= settings.options.items()
    assert (settings.options["token_budget"], settings.most_waiting) == (64, 9)
    assert settings.all_models[-1] == "generate"
    assert isinstance(run(engine, "-o", str(out)).exception, UserError)
    result = run(engine, "-o", str(out), "--add-version", "--in-process", "--reference")
    assert result.exit_code == 0, result.output
    assert versions(out)[2].all_models == ["generate"]
    assert versions(out)[2].directory(out / "generate/2") == demo_engine_directory.resolve()
    assert versions(out)[1].directory(out / "generate/1") == (out / "generate/1/engine").resolve()
    assert run(engine, "-o", str(out), "--force", "--in-process").exit_code == 0
    assert list(versions(out)) == [1]


def test_an_engine_on_a_gpu_is_one_model(demo_engine_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(render, "runs_on_host", lambda *_: False)
    result = run(str(demo_engine_directory), "-o", str(tmp_path / "out"))
    assert isinstance(result.exception, UserError)
    assert "--in-process" in result.exception.hint
    assert run(str(demo_engine_directory), "-o", str(tmp_path / "out"), "--in-process").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out"),
        (["-o", "x"], "nothing to do"),
        (["e", "-o", "x", "--prefix-cache", "many"], "no size"),
        (["e", "-o", "x", "--add-version", "--force"], "exclude"),
        (["-o", "x", "--run", "--http-port", "70000"], "http-port"),
    ],
)
def test_wrong_usage(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_directory_that_is_no_repository(tmp_path, server):
    for arguments in (["--reload", server.address], ["--run"]):
        result = run("-o", str(tmp_path), *arguments)
        assert isinstance(result.exception, UserError)
        assert "not a repository" in str(result.exception)


def event(**values) -> bytes:
    found = {
        "text_output": "a",
        "finish_reason": "",
        "num_input_tokens": 0,
        "num_output_tokens": 1,
        "total_accepted_draft_tokens": 0,
    }
    return b"data: " + json.dumps(found | values).encode() + b"\n\n"


def test_the_client_over_http(server):
    path = "/v2/models/generate/generate_stream"
    client = TritonClient(f"http://{server.address}")
    server.answers[path] = 200, event(num_input_tokens=3) + event(text_output="b", finish_reason="stop")
    answer = client.generate("x")
    assert (answer.text, answer.tokens, answer.prompt_tokens, answer.finish_reason) == ("ab", 2, 3, "stop")
    assert [p.text for p in client.stream("x")] == ["a", "b"]
    for content, said, busy in (
        (event(), "before its end", True),
        (b"", "before its end", True),
        (b'data: {"error": "busy: full"}\n\n', "full", True),
        (event() + b'data: {"error": "it failed"}\n\n', "it failed", False),
    ):
        server.answers[path] = 200, content
        with pytest.raises(TritonError, match=said) as caught:
            client.generate("x")
        assert caught.value.busy == busy


def test_models_are_reloaded_in_order(server):
    control = Control(server.address)
    names = [f"/v2/repository/models/{n}" for n in ("verify", "generate")]
    server.answers = {f"{n}/{what}": (200, b"") for n in names for what in ("load", "unload")}
    control.reload(["verify", "generate"])
    assert server.asked == [
        f"{names[1]}/unload",
        f"{names[0]}/unload",
        f"{names[0]}/load",
        f"{names[1]}/load",
    ]
    with pytest.raises(UserError, match="it is not there"):
        control.load("other")
