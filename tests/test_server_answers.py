# SPDX-License-Identifier: Apache-2.0
"""Answers to conversations: calls that the end cut off, and several answers to one prompt."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from nemo_build.runtime import Engine, SamplingParams, Scheduling
from nemo_build.runtime.prefix_cache import PrefixCacheStatistics
from nemo_build.runtime.scheduler import SchedulerStatistics
from nemo_build.runtime.server.backend import EngineBackend, Piece, Statistics
from nemo_build.runtime.server.generation import Asked, generate
from nemo_build.runtime.server.metrics import Metrics
from nemo_build.runtime.stopping import FinishReason

from .serving import Served, served
from .test_server_structured import ASK, CHAT, WEATHER

BLOCK = 64
"""Tokens that the prefix cache keeps together."""

STRICT = {"tools": [WEATHER], "tool_choice": "required", "enable_thinking": False}


@pytest.fixture(scope="module")
def server(demo_engine_directory) -> Served:
    engine = Engine.load(demo_engine_directory, threads=1, prefix_cache=32 << 20, max_sequences=4)
    with served(EngineBackend(engine)) as found:
        yield found


# --- calls that the end cut off ------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["<parameter=", "</parameter>", "ty>", "da"])
def test_a_call_that_a_stop_string_cut_off_is_none_to_be_made(server, stop):
    ask = {**ASK, **STRICT, "stop": [stop]}
    [found] = server.post(CHAT, **ask)["choices"]
    [call] = found["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) < {"city", "days"}
    assert found["finish_reason"] == "stop"
    assert server.chunks(CHAT, **ask)[-1]["choices"][0]["finish_reason"] == "stop"
    response = server.post(
        "/v1/responses",
        input="hello",
        temperature=0,
        tools=[{"type": "function", **WEATHER["function"]}],
        tool_choice="required",
        reasoning={"effort": "none"},
        stop=[stop],
    )
    assert response["output"][-1]["type"] == "function_call"
    assert response["output"][-1]["status"] == "incomplete"


def test_a_stop_string_behind_the_last_parameter_leaves_a_call(server):
    for stop in ("</tool_call>", "\n</tool_call>"):
        [found] = server.post(CHAT, **ASK, **STRICT, stop=[stop])["choices"]
        assert found["finish_reason"] == "tool_calls"
        assert set(json.loads(found["message"]["tool_calls"][0]["function"]["arguments"])) == {"city", "days"}


def test_a_call_without_an_end_for_want_of_tokens(server):
    [found] = server.post(CHAT, **{**ASK, **STRICT, "max_tokens": 12})["choices"]
    assert found["finish_reason"] == "length"


# --- several answers to one prompt ---------------------------------------------------------------------------


def test_answers_to_one_prompt_compute_it_once(server):
    server.post(CHAT, **{**ASK, "max_tokens": 1})  # the cache has been asked for something
    messages = [{"role": "user", "content": "some words to be read " * 45}]
    before = server.backend.statistics()
    answer = server.post(CHAT, messages=messages, max_tokens=4, n=4, seed=1)
    after = server.backend.statistics()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    saved = after.cache.saved_tokens - before.cache.saved_tokens
    blocks = (answer["usage"]["prompt_tokens"] - 1) // BLOCK
    assert saved == 2 * blocks * BLOCK > 0.7 * answer["usage"]["prompt_tokens"] * 2
    before = after
    done = server.post(
        "/v1/completions", prompt=["a long text " * 60, "another text " * 60], n=3, max_tokens=2
    )
    assert len(done["choices"]) == 6
    saved = server.backend.statistics().cache.saved_tokens - before.cache.saved_tokens
    assert saved > 0.6 * done["usage"]["prompt_tokens"]


@dataclass
class Slow:
    """A backend that says when a request reached it, and what was asked of the scheduler."""

    queries: int = 1
    seconds: float = 0.2
    fails: bool = False
    came: list[tuple[float, Scheduling]] = field(default_factory=list)
    context: int = 100

    def statistics(self) -> Statistics:
        cache = PrefixCacheStatistics(queries=self.queries)
        return Statistics(SchedulerStatistics(0, 0, 0, 0, 1, 0, 0), cache)

    async def stream(self, prompt, params, scheduling, *, skip_special_tokens=False):
        self.came.append((asyncio.get_running_loop().time(), scheduling))
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("it fails")
        yield Piece("a", 1, prompt_tokens=1, cached_tokens=0)
        await asyncio.sleep(self.seconds)
        yield Piece("", 2, finish_reason=FinishReason.LENGTH)


async def all_of(backend: Slow, asked: list[Asked]) -> list[int]:
    """The indices of what comes, in order."""
    async with aclosing(generate(backend, Metrics(backend, "x"), asked)) as found:
        return [index async for index, _ in found]


def asked_for(*prompts: list[int], timeout: float | None = None) -> list[Asked]:
    return [Asked(prompt, SamplingParams(max_tokens=2), Scheduling(timeout=timeout)) for prompt in prompts]


def test_answers_wait_for_first_tokens_where_there_is_a_cache():
    one, two = [1, 2], [3]
    backend = Slow()
    indices = asyncio.run(all_of(backend, asked_for(one, one, one, one, two)))
    assert sorted(indices) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    start, *times = [time - backend.came[0][0] for time, _ in backend.came]
    assert start == 0
    assert times[0] < 0.16, "the other prompt waits for nothing"
    assert 0.16 < times[1] < 0.36, "the second does not wait for the last token of the first"
    assert all(0.36 < time < 0.76 for time in times[2:])
    without = Slow(queries=0)
    asyncio.run(all_of(without, asked_for(one, one)))
    assert without.came[1][0] - without.came[0][0] < 0.16


def test_waiting_takes_of_the_time_that_an_answer_has():
    prompt = [1]
    backend = Slow()
    asyncio.run(all_of(backend, asked_for(prompt, prompt, timeout=10)))
    (_, first), (_, second) = backend.came
    assert first.timeout == 10
    assert 9 < second.timeout < 9.85
    late = Slow()
    asyncio.run(all_of(late, asked_for(prompt, prompt, timeout=0.01)))
    assert 0 < late.came[1][1].timeout < 0.01


def test_who_waits_for_one_that_fails_is_told():
    prompt = [1]
    backend = Slow(fails=True)
    with pytest.raises(RuntimeError, match="it fails"):
        asyncio.run(asyncio.wait_for(all_of(backend, asked_for(prompt, prompt)), 5))
