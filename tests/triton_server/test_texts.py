# SPDX-License-Identifier: Apache-2.0
"""Texts of a server are those of the runtime, whatever drafts and whichever way they come."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_build.runtime import SamplingParams
from nemo_build.runtime.triton_client import TritonClient

from .running import until

PROMPTS = [
    "The :mod:`json` module",
    "def main():\n    ",
    "import",
    "Lists are " * 40,
    "é漢🎈 \0 ",
    "class A:\n",
]
WAYS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, seed=2**64 - 1, stop=["return", "5"]),
    SamplingParams(
        max_tokens=24, temperature=0, repetition_penalty=1.3, logit_bias={7: -5.0}, min_tokens=4, logprobs=2
    ),
]
QUESTIONS = [(prompt, way) for prompt in PROMPTS for way in WAYS]


@pytest.fixture(scope="module")
def answers(plain):
    found = plain.generate([p for p, _ in QUESTIONS], [w for _, w in QUESTIONS])
    return [
        (a.text, str(a.finish_reason), len(a.token_ids), a.prompt_tokens, a.logprobs or ()) for a in found
    ]


def ask(client: TritonClient, question, streams: bool):
    if not streams:
        answer = client.generate(*question)
        return answer.text, answer.finish_reason, answer.tokens, answer.prompt_tokens, answer.logprobs
    pieces = list(client.stream(*question))
    assert len(pieces) > 1
    assert not any(p.finish_reason for p in pieces[:-1])
    return (
        "".join(p.text for p in pieces),
        pieces[-1].finish_reason,
        sum(p.tokens for p in pieces),
        sum(p.prompt_tokens for p in pieces),
        tuple(found for p in pieces for found in p.logprobs),
    )


def check(running, answers) -> None:
    for address in (f"grpc://{running.grpc}", running.http):
        client = TritonClient(address)
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, client, q, streams=i % 2 == 0) for i, q in enumerate(QUESTIONS)]
            found = [a.result(60) for a in asked]
        assert found == answers


@pytest.mark.parametrize("speculator", ["none", "dflash", "dspark", "ngram"])
def test_texts_are_those_of_the_runtime(serve, answers, speculator):
    with serve(speculate=speculator, draft_length=None if speculator == "none" else 3) as running:
        check(running, answers)
        if speculator != "none":
            until(lambda: running.gauge("accepted_draft_tokens") > 0)
        assert running.gauge("requests_failed") == 0


def test_texts_with_mtp_and_a_prefix_cache(mtp, answers):
    check(mtp, answers)


def test_texts_of_an_engine_in_one_model(serve, answers):
    with serve(in_process=True, speculate="mtp") as running:
        assert running.stubs("generate")
        assert not running.stubs("verify")
        check(running, answers)


def test_32_clients(mtp, plain):
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompts = [f"def f{i}(" for i in range(32)]
    want = [a.text for a in plain.generate(prompts, params)]
    client = TritonClient(mtp.grpc)
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda p: "".join(x.text for x in client.stream(p, params)), prompts))
    assert found == want


def greedy(plain, prompt: str, count: int = 12) -> str:
    return plain.generate(prompt, SamplingParams(max_tokens=count, temperature=0))[0].text


def test_requests_as_clients_of_tensorrt_llm_send_them(mtp, plain):
    body = {
        "text_input": "import",
        "max_tokens": 12,
        "temperature": 0.0,
        "bad_words": "",
        "stop_words": "",
        "pad_id": 2,
        "end_id": 2,
        "beam_width": 1,
        "return_num_output_tokens": True,
    }
    status, found = mtp.post(body)
    assert status == 200
    assert found["text_output"] == greedy(plain, "import")
    assert (found["num_output_tokens"], found["finish_reason"]) == (12, "length")
    status, found = mtp.post(body | {"exclude_input_in_output": False})
    assert found["text_output"] == "import" + greedy(plain, "import")


def test_requests_as_clients_of_vllm_send_them(mtp, plain):
    chosen = {"temperature": "0", "max_tokens": "12", "stop": ["\n\n\n\n"], "n": 1, "logit_bias": {"7": 0}}
    body = {"text_input": "import", "stream": False, "sampling_parameters": json.dumps(chosen)}
    assert mtp.post(body)[1]["text_output"] == greedy(plain, "import")
    body = {"text_input": "import", "parameters": {"stream": False, "temperature": 0, "max_tokens": 12}}
    assert mtp.post(body)[1]["text_output"] == greedy(plain, "import")


def test_requests_as_clients_of_dynamo_send_them(mtp, plain):
    body = {"text_input": "import", "streaming": True, "max_tokens": 12, "temperature": 0}
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"{mtp.http}/v2/models/generate/generate_stream", data, timeout=30) as reply:
        events = [json.loads(line[5:]) for line in reply if line.startswith(b"data:")]
    assert len(events) > 1
    assert "".join(e["text_output"] for e in events) == greedy(plain, "import")
    assert events[-1]["finish_reason"] == "length"


def test_numbers_are_what_was_written(mtp, plain):
    params = SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=5)
    body = {"text_input": "import", "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "seed": 5}
    assert mtp.post(body)[1]["text_output"] == plain.generate("import", params)[0].text
