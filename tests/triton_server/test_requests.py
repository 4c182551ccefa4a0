# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong, given up, too many or late: none ends a process, and none stays unanswered."""

from __future__ import annotations

import json
import socket
import threading
import time

import numpy as np
import pytest

from nemo_build.runtime import SamplingParams
from nemo_build.runtime.triton_client import TritonClient, TritonError

from .running import GENERATE, until

grpc = pytest.importorskip("tritonclient.grpc")

LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
JSON = "sampling_parameters"
WRONG = {
    "temperature below 0": ({"temperature": -1}, "temperature"),
    "temperature that is no number": ({JSON: '{"temperature": NaN}'}, "temperature"),
    "temperature of a wrong kind": ({JSON: '{"temperature": [[]], "min_tokens": "x"}'}, "min_tokens"),
    "top_p of 0": ({"top_p": 0}, "top_p"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "beams": ({"beam_width": 4}, "beam_width"),
    "several answers": ({JSON: '{"n": 2}'}, "n is 2"),
    "unknown parameter": ({JSON: '{"temprature": 0}'}, "temprature"),
    "no JSON": ({JSON: "{"}, "JSON"),
    "no object": ({JSON: "[1]"}, "JSON object"),
    "deep JSON": ({JSON: "[" * 100_000}, "JSON"),
    "deep JSON in a string": ({JSON: json.dumps({"top_k": "[" * 100_000})}, "top_k"),
    "long number": ({JSON: '{"max_tokens": ' + "9" * 4000 + "}", "temperature": 200}, "temperature"),
    "much JSON": ({JSON: '{"stop": "' + "x" * (1 << 20) + '"}'}, "1048576"),
    "token outside": ({JSON: '{"logit_bias": {"99999999": 1}}'}, "99999999"),
    "many stop words": ({"stop_words": ["x"] * 65}, "65"),
    "timeout of 0": ({"timeout": 0}, "timeout"),
    "empty": ({"text_input": ""}, "no tokens"),
    "too long in tokens": ({"text_input": "a\n" * 4000}, "context is 1024"),
    "too long in bytes": ({"text_input": "x" * 4_000_000}, "4000000 bytes"),
}


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(mtp, given, said):
    status, found = mtp.post({"text_input": "import", "max_tokens": 4} | given)
    assert status == 400
    assert said in found["error"]
    assert len(found["error"]) < 3000


BODIES = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{",
    "deep": b'{"text_input": ' + b"[" * 2000,
    "unknown input": b'{"text_input": "x", "no_such": 1}',
    "no text": b'{"max_tokens": 3}',
    "text of another type": b'{"text_input": 5}',
    "tokens as text": b'{"text_input": "x", "max_tokens": "many"}',
    "half a surrogate pair": b'{"text_input": "\\ud800"}',
    "invalid UTF-8": b'{"text_input": "\xff\xfe", "max_tokens": 2}',
    "two prompts": b'{"text_input": ["x", "y"], "max_tokens": 2}',
    "nested text": b'{"text_input": {"a": 1}}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_wrong(mtp, body):
    status, found = mtp.post(body)
    assert status in (400, 500)
    assert found["error"]


@pytest.mark.parametrize("body", [{"max_tokens": 2**31 - 1, "stop_words": "e"}, {"top_k": 2**31 - 1}])
def test_what_is_large_is_cut_down(mtp, body):
    status, found = mtp.post({"text_input": "\0 \u0007 é", "temperature": 0, "max_tokens": 3} | body)
    assert status == 200
    assert found["finish_reason"] in ("stop", "length")


def tensor(name: str, values, kind: str):
    array = np.array(values, np.object_ if kind == "BYTES" else None)
    made = grpc.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


@pytest.mark.parametrize(
    "tensors",
    [
        [tensor("text_input", [[b"\xff\xfe"]], "BYTES")],
        [tensor("text_input", [[b"x", b"y"]], "BYTES")],
        [tensor("text_input", [[b"x"], [b"y"]], "BYTES")],
        [tensor("text_input", [b"x"], "BYTES")],
        [tensor("text_input", [[b"x"]], "BYTES"), tensor("max_tokens", [[1.5]], "FP64")],
        [tensor("text_input", [[b"x"]], "BYTES"), tensor("top_p", np.float32([[np.nan]]), "FP32")],
        [tensor("text_input", [[b"x"]], "BYTES"), tensor("timeout", np.float32([[np.nan]]), "FP32")],
        [tensor("text_input", [[b"x"]], "BYTES"), tensor("stop_words", [[b"\xff"]], "BYTES")],
    ],
)
def test_tensors_that_are_wrong(mtp, tensors):
    answered = threading.Event()
    errors = []

    def take(result, error) -> None:
        errors.append(error)
        answered.set()

    with grpc.InferenceServerClient(mtp.grpc) as client:
        client.start_stream(take)
        client.async_stream_infer("generate", tensors)
        assert answered.wait(30)
        client.stop_stream()
    assert errors[0] is not None


def is_idle(running) -> bool:
    return running.gauge("slots_free") == 4 and running.gauge("requests_running") == 0


def test_closing_a_stream_frees_the_slot(mtp):
    stream = TritonClient(mtp.grpc).stream("import", LONG)
    next(stream)
    until(lambda: mtp.gauge("requests_running") == 1)
    stream.close()
    until(lambda: is_idle(mtp), 3)


def test_closing_the_socket_frees_the_slot(mtp):
    body = json.dumps(
        {"text_input": "import", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
    )
    with socket.create_connection(("127.0.0.1", mtp.server.ports.http)) as connection:
        head = f"POST {GENERATE}_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        connection.sendall(head.encode())
        assert b"200" in connection.recv(4096)
        until(lambda: mtp.gauge("requests_running") == 1)
    until(lambda: is_idle(mtp), 3)


def test_a_request_ends_at_its_timeout(mtp):
    answer = TritonClient(mtp.grpc).generate("import", LONG, timeout=0.2)
    assert answer.finish_reason == "timeout"
    assert 0 < answer.tokens < 900
    status, found = mtp.post({"text_input": "import", "max_tokens": 900, "ignore_eos": True, "timeout": 0.2})
    assert (status, found["finish_reason"]) == (200, "timeout")


def test_higher_priorities_come_first(mtp):
    client = TritonClient(mtp.grpc)
    streams = [client.stream("import", LONG) for _ in range(4)]
    for stream in streams:
        next(stream)
    start = time.monotonic()
    client.generate("class", SamplingParams(max_tokens=2), priority=3)
    took = time.monotonic() - start
    until(lambda: mtp.gauge("preemptions") >= 1)
    assert mtp.gauge("requests_waiting") + mtp.gauge("requests_running") == 4, "none of them has ended"
    for stream in streams:
        stream.close()
    until(lambda: is_idle(mtp), 3)
    assert took < 5


def test_too_many_are_refused_as_busy(serve):
    with serve(most_waiting=1, max_sequences=1) as running:
        client = TritonClient(running.grpc)
        assert client.generate("import", SamplingParams(max_tokens=1)).tokens == 1
        stream = client.stream("import", LONG)
        next(stream)
        waiting = client.stream("import", LONG)
        thread = threading.Thread(target=lambda: list(waiting))
        thread.start()
        until(lambda: running.gauge("requests_waiting") == 1)
        for address in (running.grpc, running.http):
            with pytest.raises(TritonError, match="1 requests wait already") as caught:
                TritonClient(address).generate("import", LONG)
            assert caught.value.busy
        assert running.control.probe(3) is None, "a busy server works"
        stream.close()
        thread.join(30)
        assert not thread.is_alive()
        assert running.control.probe(3) is None


def test_errors_of_the_client(mtp):
    for address in (mtp.grpc, mtp.http):
        with pytest.raises(TritonError, match="no tokens") as caught:
            TritonClient(address).generate("")
        assert not caught.value.busy
    for address in ("grpc://127.0.0.1:1", "http://127.0.0.1:1"):
        with pytest.raises(TritonError, match=r"127\.0\.0\.1:1") as caught:
            TritonClient(address).generate("x")
        assert caught.value.busy
    for address in (mtp.grpc, mtp.http):
        with pytest.raises(TritonError, match="no-such-model"):
            TritonClient(address, model="no-such-model").generate("x")
    with pytest.raises(TritonError, match="ftp"):
        TritonClient("ftp://x")


def test_nothing_of_this_ended_a_process(mtp):
    """The last of them: the same processes work, and no request was lost to a failed step."""
    assert mtp.control.probe(10) is None
    assert mtp.gauge("requests_failed") == 0
    assert "is not healthy" not in mtp.log.read_text(errors="replace")
    for model in ("generate", "draft_mtp", "verify", "accept"):
        assert len(mtp.stubs(model)) == 1
