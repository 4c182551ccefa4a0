# SPDX-License-Identifier: Apache-2.0
"""A Triton server behind the OpenAI server, on a front in this process: what comes, and what is told if not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace

import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime import Engine, SamplingParams, Scheduling
from nemo_build.runtime.server import triton
from nemo_build.runtime.server.backend import BusyError, EngineBackend
from nemo_build.runtime.server.triton import TritonBackend
from nemo_build.runtime.triton_client import TritonClient, TritonError
from nemo_build.triton_repo.front import Front

from .triton_http import HttpFront

LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
PROMPT = "def main():\n    "


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(
        demo_engine_directory, max_sequences=2, speculate="mtp", draft_length=3, prefix_cache=8 << 20
    )


@pytest.fixture
def serving(engine):
    front = Front(lambda: engine, most_waiting=2, speculator="mtp")
    with HttpFront(front) as server:
        yield server
    front.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(triton, "_LOOK", 0.05)


@contextlib.asynccontextmanager
async def opened(directory, url):
    backend = TritonBackend(directory, url)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def all_of(backend, prompt, params, scheduling=None, **options):
    return [p async for p in backend.stream(prompt, params, scheduling or Scheduling(), **options)]


def go(work):
    return asyncio.run(asyncio.wait_for(work, 60))


async def until(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        await asyncio.sleep(0.01)


def told(pieces):
    """What matters of pieces; which come together is chance."""
    return [replace(p, more=False, queued=None, cached_tokens=None) for p in pieces]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, temperature=0, logprobs=2),
        SamplingParams(max_tokens=30, temperature=0.8, seed=7, stop=["return", "self."]),
        SamplingParams(max_tokens=30, temperature=0, stop_token_ids=[10], logit_bias={5: 1.5}),
        SamplingParams(max_tokens=3, temperature=0, min_tokens=3, logprobs=0),
    ],
)
def test_pieces_are_those_of_an_engine_in_this_process(engine, serving, params):
    prompt = engine.tokenizer.encode(PROMPT)

    async def run():
        local = EngineBackend(engine)
        await local.start()
        want = await all_of(local, prompt, params)
        async with opened(engine.directory, serving.url) as backend:
            got = await all_of(backend, prompt, params)
        await local.close()
        return want, got

    want, got = go(run())
    assert told(got) == told(want)
    assert got[0].prompt_tokens == len(prompt)
    assert got[0].cached_tokens is not None
    assert got[0].queued is not None
    assert not got[-1].more
    if params.logprobs is not None:
        assert all(len(p.logprobs.top) == params.logprobs for p in got if p.token_id is not None)


def test_what_it_says_of_itself(engine, serving):
    async def run():
        async with opened(engine.directory, serving.url) as backend:
            await backend.check()
            await all_of(backend, [1, 2, 3], SamplingParams(max_tokens=20, temperature=0))
            await until(lambda: backend.statistics().acceptance.steps >= engine.acceptance.steps)
            return backend, backend.statistics()

    backend, statistics = go(run())
    local = EngineBackend(engine)
    for name in ("name", "target", "spec", "default_params", "context", "slots"):
        assert getattr(backend, name) == getattr(local, name), name
    assert backend.speculator == "mtp"
    assert statistics.acceptance == engine.acceptance
    assert statistics.scheduler.steps <= engine.statistics().steps
    assert statistics.cache.queries > 0
    assert backend.template.render([{"role": "user", "content": "x"}])


def test_closing_a_stream_frees_the_slot(engine, serving):
    async def run():
        async with opened(engine.directory, serving.url) as backend:
            stream = backend.stream([1, 2], LONG, Scheduling())
            await anext(stream)
            assert engine.statistics().running == 1
            await stream.aclose()
            await until(lambda: engine.statistics().free_slots == 2, 3)
            task = asyncio.create_task(all_of(backend, [1, 2], LONG))
            await until(lambda: engine.statistics().running == 1)
            task.cancel()
            await until(lambda: engine.statistics().free_slots == 2, 3)

    go(run())


def test_what_is_wrong_with_a_request_is_told_as_here(engine, serving):
    async def run():
        async with opened(engine.directory, serving.url) as backend:
            for prompt, params in (
                ([], LONG),
                ([10**9], LONG),
                ([1], SamplingParams(stop_token_ids=[10**8])),
            ):
                with pytest.raises(RequestError) as want:
                    engine.requests([prompt], params)
                with pytest.raises(RequestError) as got:
                    await all_of(backend, prompt, params)
                assert (got.value.headline, got.value.problems) == (want.value.headline, want.value.problems)

    go(run())


def test_too_much_to_do_is_told_from_not_working(engine, serving):
    async def run():
        async with opened(engine.directory, serving.url) as backend:
            tasks = [asyncio.create_task(all_of(backend, [1], LONG)) for _ in range(2)]
            await until(lambda: engine.statistics().running == 2)
            tasks += [asyncio.create_task(all_of(backend, [1], LONG)) for _ in range(2)]
            await until(lambda: engine.statistics().waiting == 2)
            with pytest.raises(BusyError, match="2 requests wait already"):
                await all_of(backend, [1], LONG)
            await backend.check()
            await until(lambda: backend.statistics().scheduler.waiting == 2)
            for task in tasks:
                task.cancel()
            await until(lambda: engine.statistics().free_slots == 2)

    go(run())


def test_who_waits_for_a_dead_process_is_told_so(engine, serving):
    async def run():
        async with opened(engine.directory, serving.url) as backend:
            stream = backend.stream([1, 2], LONG, Scheduling())
            await anext(stream)
            serving.dead = True
            with pytest.raises(ConnectionError, match="not healthy"):
                async for _ in stream:
                    pass
            assert backend.statistics().scheduler.running == 0
            with pytest.raises(ConnectionError, match="not healthy"):
                await all_of(backend, [1, 2], LONG)
            with pytest.raises(ConnectionError, match="not healthy"):
                await backend.check()
            serving.dead = False
            await backend.check()
            assert len(await all_of(backend, [1, 2], replace(LONG, max_tokens=2))) == 2

    go(run())


def test_a_server_may_come_late_and_go(engine):
    async def run():
        front = Front(lambda: engine, speculator="mtp")
        with HttpFront(front) as first:
            port = first.port
        async with opened(engine.directory, f"http://127.0.0.1:{port}") as backend:
            assert backend.speculator is None
            assert backend.slots == 4, "as built, until the server says what it has"
            with pytest.raises(ConnectionError):
                await backend.check()
            with HttpFront(front, port):
                await until(lambda: backend.slots == 2)
                await backend.check()
            with pytest.raises(ConnectionError):
                await all_of(backend, [1], LONG)
            with HttpFront(front, port):
                await backend.check()
        front.close()

    go(run())


def test_another_engine_is_noticed(engine, serving, tmp_path):
    manifest = read_manifest(engine.directory, ENGINE_BUNDLE)
    for name in manifest["files"]:
        (tmp_path / name).write_bytes((engine.directory / name).read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BundleError):
        TritonBackend(tmp_path, serving.url)
    import hashlib

    manifest["files"]["tokenizer.json"] = hashlib.sha256(
        (tmp_path / "tokenizer.json").read_bytes()
    ).hexdigest()
    (tmp_path / ENGINE_BUNDLE).write_text(json.dumps(manifest))
    backend = TritonBackend(tmp_path, serving.url)
    with pytest.raises(BundleError, match="serves another model"):
        asyncio.run(backend.start())


def test_token_ids_and_control_tokens(engine, serving):
    client = TritonClient(serving.url)
    prompt = engine.tokenizer.encode(PROMPT)
    params = SamplingParams(
        max_tokens=8, temperature=0, stop_token_ids=[engine.eos_ids[0]], include_stop=True
    )
    params = replace(params, logit_bias={engine.eos_ids[0]: 100.0}, ignore_eos=True)
    pieces = list(client.stream(prompt, params, skip_special_tokens=False, details=True))
    assert pieces[-1].details.stop_reason == engine.eos_ids[0]
    assert sum((p.details.token_ids for p in pieces), ()) == (engine.eos_ids[0],)
    assert "".join(p.text for p in pieces) == engine.tokenizer.token_bytes(engine.eos_ids[0]).decode()
    assert "".join(p.text for p in client.stream(prompt, params)) == ""
    assert all(p.details is None for p in client.stream(prompt, params))


def test_addresses():
    for address, said in (("ftp://x", "ftp"), ("http://x", "HOST:PORT"), ("http://x:y", "no address")):
        with pytest.raises(TritonError, match=said):
            triton.AsyncTritonClient(address)
