# SPDX-License-Identifier: Apache-2.0
"""Grammars, thinking, token ids and log probabilities through a server: what comes is what the runtime gives."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nemo_build.runtime import Grammar, SamplingParams, Scheduling, Thinking
from nemo_build.runtime.server.backend import BusyError
from nemo_build.runtime.server.triton import TritonBackend
from nemo_build.runtime.triton_client import TritonClient

from .running import Running, until

pytest.importorskip("llguidance")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["list", "dict", "set"]},
            "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "kind", "sizes"],
        "additionalProperties": False,
    }
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["word", "count"],
        },
    },
}
CALL = Grammar("tools", json.dumps({"tools": [TOOL], "choice": "required", "parallel": False}))
WAYS = {
    "json_schema": SamplingParams(
        max_tokens=60, temperature=0, grammar=Grammar("json_schema", SCHEMA), logprobs=2
    ),
    "sampled": SamplingParams(max_tokens=60, temperature=0.9, seed=3, grammar=Grammar("json_schema", SCHEMA)),
    "regex": SamplingParams(
        max_tokens=30, temperature=0, grammar=Grammar("regex", "[a-z]{4,8}(, [0-9]{2}){3}")
    ),
    "call": SamplingParams(max_tokens=80, temperature=0, grammar=CALL),
    "thinking": SamplingParams(max_tokens=24, temperature=0, thinking=Thinking(7, grace=3), logprobs=0),
    "schema after thinking": SamplingParams(
        max_tokens=80,
        temperature=0.8,
        seed=11,
        thinking=Thinking(5),
        grammar=Grammar("json_schema", SCHEMA, after_thinking=True),
    ),
    "plain": SamplingParams(max_tokens=40, temperature=0),
}
PROMPT = "def main():\n    "
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tokens(plain) -> list[int]:
    return plain.tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def answers(plain, tokens):
    found = plain.generate([tokens] * len(WAYS), list(WAYS.values()), skip_special_tokens=False)
    return dict(zip(WAYS, found, strict=True))


def check(running: Running, tokens, answers) -> None:
    """All of them at the same time, twice, over both protocols."""

    def ask(client: TritonClient, params: SamplingParams):
        pieces = list(client.stream(tokens, params, skip_special_tokens=False, details=True))
        return (
            "".join(p.text for p in pieces),
            sum((p.details.token_ids for p in pieces), ()),
            sum((p.logprobs for p in pieces), ()),
            pieces[-1].details.stop_reason,
        )

    for client in (TritonClient(f"grpc://{running.grpc}"), TritonClient(running.http)):
        with ThreadPoolExecutor(len(WAYS)) as pool:
            asked = {name: pool.submit(ask, client, params) for name, params in WAYS.items()}
            for name, future in asked.items():
                want = answers[name]
                assert future.result(60) == (
                    want.text,
                    want.token_ids,
                    want.logprobs or (),
                    want.matched,
                ), name


def test_answers_make_sense(answers):
    for name in ("json_schema", "sampled"):
        if str(answers[name].finish_reason) == "stop":
            assert json.loads(answers[name].text.removesuffix("<|im_end|>"))["kind"] in (
                "list",
                "dict",
                "set",
            )
    assert answers["call"].text.lstrip().startswith("<tool_call>\n<function=look_up>\n<parameter=word>\n")
    assert "</think>" in answers["thinking"].text
    assert "</think>" in answers["schema after thinking"].text


def test_with_mtp(mtp, tokens, answers):
    check(mtp, tokens, answers)
    until(lambda: mtp.gauge("accepted_draft_tokens") > 0)


@pytest.mark.parametrize("speculator", ["none", "dspark", "ngram"])
def test_with_other_speculators(serve, tokens, answers, speculator):
    with serve(speculate=speculator) as running:
        check(running, tokens, answers)
        assert running.gauge("requests_failed") == 0


def test_in_one_model(serve, tokens, answers):
    with serve(in_process=True, speculate="mtp") as running:
        check(running, tokens, answers)


def test_new_grammars_under_load(mtp, plain, tokens):
    """Processes prepare for grammars beside the steps of others."""
    stop = threading.Event()
    client = TritonClient(mtp.grpc)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    want = plain.generate([tokens], params)[0].text

    def load() -> set[str]:
        found = set()
        while not stop.is_set():
            found.add(client.generate(tokens, params).text)
        return found

    def guided(i: int) -> str:
        grammar = Grammar("regex", f"(ab|cd|[x-z]){{{i + 3}}}")
        return client.generate(tokens, SamplingParams(max_tokens=60, temperature=0, grammar=grammar)).text

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load) for _ in range(3)]
        found = list(pool.map(guided, range(24)))
        stop.set()
        assert all(future.result(30) == {want} for future in loads)
    again = [
        plain.generate(
            [tokens],
            SamplingParams(
                max_tokens=60, temperature=0, grammar=Grammar("regex", f"(ab|cd|[x-z]){{{i + 3}}}")
            ),
        )
        for i in range(24)
    ]
    assert found == [a[0].text for a in again]


def test_a_dead_model_takes_grammars_with_it_and_they_come_again(serve, tokens, answers):
    with serve(speculate="mtp") as running:
        check(running, tokens, answers)
        running.kill("verify")
        check(running, tokens, answers)
        with ThreadPoolExecutor(4) as pool:
            client = TritonClient(running.grpc)
            params = replace(WAYS["call"], max_tokens=80)
            asked = [pool.submit(client.generate, tokens, params, timeout=60) for _ in range(4)]
            until(lambda: running.gauge("requests_running") > 0)
            running.kill("draft_mtp")
            skipped = {a.result(60).text for a in asked}
        assert len(skipped) == 1
        assert running.gauge("requests_failed") == 0


def test_what_is_wrong_with_a_grammar_is_said(mtp):
    for body, said in (
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("}, "regex"),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"}, "JSON"),
        ({"sampling_parameters": '{"grammar": {"kind": "odd"}}'}, "odd"),
    ):
        status, found = mtp.post({"text_input": "x", "max_tokens": 2} | body)
        assert status == 400
        assert said in found["error"]
        assert not found["error"].startswith("fault")


# --- the backend of the OpenAI server ----------------------------------------------------------------------------


@pytest.fixture(params=["http", "grpc"])
def address(request, mtp) -> str:
    return mtp.http if request.param == "http" else f"grpc://{mtp.grpc}"


def run(directory, address: str, work) -> None:
    async def inner():
        backend = TritonBackend(directory, address)
        await backend.start()
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(inner())


def test_the_backend_gives_what_the_runtime_gives(demo_engine_directory, mtp, address, tokens, answers):
    async def work(backend):
        async def one(params):
            return [p async for p in backend.stream(tokens, params, Scheduling())]

        await backend.check()
        found = await asyncio.gather(*(one(params) for params in WAYS.values()))
        for want, pieces in zip(answers.values(), found, strict=True):
            assert "".join(p.text for p in pieces) == want.text
            assert tuple(p.token_id for p in pieces if p.token_id is not None) == want.token_ids
            assert pieces[-1].finish_reason == want.finish_reason
            assert pieces[-1].matched == want.matched
            assert pieces[0].prompt_tokens == len(tokens)
            if want.logprobs is not None:
                assert tuple(p.logprobs for p in pieces if p.token_id is not None) == want.logprobs
        assert any(p.drafted for pieces in found for p in pieces)
        assert backend.speculator == "mtp"
        await asyncio.sleep(1.5)
        assert sum(backend.statistics().acceptance.accepted) == mtp.gauge("accepted_draft_tokens")

    run(demo_engine_directory, address, work)


def test_leaving_the_backend_frees_the_slot(demo_engine_directory, mtp, address, tokens):
    async def work(backend):
        for _ in range(3):
            stream = backend.stream(tokens, LONG, Scheduling())
            await anext(stream)
            await asyncio.to_thread(until, lambda: mtp.gauge("requests_running") == 1)
            await stream.aclose()
            await asyncio.to_thread(until, lambda: mtp.gauge("requests_running") == 0, 3)

    run(demo_engine_directory, address, work)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_backend_of_a_server_that_is_too_busy_and_dies(demo_engine_directory, serve, protocol, tokens):
    with serve(max_sequences=1, most_waiting=1) as running:

        async def work(backend):
            await backend.check()
            streams = [backend.stream(tokens, LONG, Scheduling()) for _ in range(2)]
            await anext(streams[0])
            waiting = asyncio.ensure_future(anext(streams[1]))
            await asyncio.to_thread(until, lambda: running.gauge("requests_waiting") == 1)
            with pytest.raises(BusyError):
                await anext(backend.stream(tokens, LONG, Scheduling()))
            await backend.check()
            running.kill("generate")
            with pytest.raises(ConnectionError):
                async for _ in streams[0]:
                    pass
            with pytest.raises(ConnectionError):
                await waiting
            with pytest.raises(ConnectionError):
                await backend.check()

        run(demo_engine_directory, running.http if protocol == "http" else f"grpc://{running.grpc}", work)
