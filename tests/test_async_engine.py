# SPDX-License-Identifier: Apache-2.0
"""The asyncio front, on the demo checkpoint."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime import AsyncEngine, Engine, FinishReason, SamplingParams, Scheduling

GREEDY = SamplingParams(max_tokens=24, temperature=0)
LONG = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
PROMPTS = ["import os\n", "The list type", "def main(argv):\n", "class", "for i in range", "x = ["]


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory, max_sequences=3)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_coroutines_get_what_they_get_alone(engine):
    want = engine.generate(PROMPTS, GREEDY)

    async def main() -> None:
        async with AsyncEngine(engine) as front:

            async def stream(prompt: str) -> str:
                return "".join([c.text async for c in front.stream(prompt, GREEDY)])

            assert await asyncio.gather(*(front.generate(p, GREEDY) for p in PROMPTS)) == want
            assert await asyncio.gather(*map(stream, PROMPTS)) == [w.text for w in want]

    asyncio.run(main())
    assert engine.statistics().free_slots == 3


def test_threads_and_coroutines_together(engine):
    want = engine.generate(PROMPTS, GREEDY)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(engine.generate(PROMPTS, GREEDY))) for _ in range(2)
    ]

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            for t in threads:
                t.start()
            assert await asyncio.gather(*(front.generate(p, GREEDY) for p in PROMPTS)) == want
            await asyncio.gather(*(asyncio.to_thread(t.join) for t in threads))

    asyncio.run(main())
    assert found == [want, want]


def test_who_leaves_frees_the_slot(engine):
    async def main() -> None:
        async with AsyncEngine(engine) as front:
            stream = front.stream(PROMPTS[0], LONG)
            await anext(stream)
            assert engine.statistics().running == 1
            await stream.aclose()
            await until(lambda: engine.statistics().free_slots == 3)

            task = asyncio.create_task(front.generate(PROMPTS[0], LONG))
            await until(lambda: engine.statistics().running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: engine.statistics().free_slots == 3)

    asyncio.run(main())


def test_closing_ends_what_runs(engine):
    async def main() -> None:
        async with AsyncEngine(engine) as front:
            tasks = [asyncio.create_task(front.generate(p, LONG)) for p in PROMPTS]
            await until(lambda: engine.statistics().running == 3)
        ends = [c.finish_reason for c in await asyncio.gather(*tasks)]
        assert set(ends) == {FinishReason.CANCELLED}
        with pytest.raises(RuntimeError, match="closed"):
            await front.generate(PROMPTS[0], GREEDY)

    asyncio.run(main())
    assert not engine.unfinished
    assert engine.statistics().free_slots == 3


def test_a_forgotten_stream_is_closed_by_whatever_thread_collects_it(engine, monkeypatch):
    """Also by one that is in a step."""
    step = engine.session.step

    def collecting(batch: object) -> object:
        monkeypatch.setattr(engine.session, "step", step)
        gc.collect()
        return step(batch)

    cycle: list[object] = [engine.stream(PROMPTS[0], LONG)]
    cycle.append(cycle)
    next(cycle[0])  # type: ignore[call-overload]
    del cycle
    monkeypatch.setattr(engine.session, "step", collecting)
    thread = threading.Thread(target=engine.generate, args=(PROMPTS[1], GREEDY), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert engine.statistics().free_slots == 3


def test_who_waits_for_its_turn_gets_what_a_step_of_another_yields(engine, monkeypatch):
    """At once, though the other thread goes on with the next step at once."""
    count, steps, seen, timely = 12, 0, 0, []
    condition, step = threading.Condition(), engine.session.step

    def slow(batch: object) -> object:
        nonlocal steps
        with condition:
            timely.append(condition.wait_for(lambda: seen == steps, timeout=10))
        output = step(batch)
        steps += 1
        return output

    def wait() -> None:
        nonlocal seen
        for n in range(1, count + 1):
            engine.step(unless=lambda n=n: steps >= n)
            with condition:
                seen = n
                condition.notify()

    monkeypatch.setattr(engine.session, "step", slow)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    thread = threading.Thread(target=wait)
    for i, _ in enumerate(stream):
        if i == 0:
            seen = 1
            thread.start()
    thread.join()
    assert timely == [True] * count


def test_timeouts_and_mistakes(engine):
    async def main() -> None:
        async with AsyncEngine(engine) as front:
            late = await front.generate(PROMPTS[0], LONG, scheduling=Scheduling(timeout=0.02))
            assert late.finish_reason is FinishReason.TIMEOUT
            assert late.text == engine.generate(PROMPTS[0], LONG)[0].text[: len(late.text)]
            with pytest.raises(RequestError, match="has no tokens"):
                await front.generate([], GREEDY)

    asyncio.run(main())


def test_an_engine_that_fails_says_so_and_goes_on(engine):
    async def main() -> None:
        async with AsyncEngine(engine) as front:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.session, "step", broken)
                for failed in await asyncio.gather(
                    *(front.generate(p, GREEDY) for p in PROMPTS), return_exceptions=True
                ):
                    assert isinstance(failed, BundleError)
                    assert "out of memory" in str(failed)
            assert await front.generate(PROMPTS[0], GREEDY) == engine.generate(PROMPTS[0], GREEDY)[0]

    def broken(batch: object) -> object:
        raise RuntimeError("out of memory")

    asyncio.run(main())


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_come_and_go_and_nothing_is_left(demo_engine_directory, requests):
    """Mixed lengths, random cancels, timeouts, a prefix cache and little memory; memory returns to its start."""
    rng = np.random.default_rng(requests)
    plan, cache = read_manifest(demo_engine_directory, ENGINE_BUNDLE)["plan"], 4 << 20
    engine = Engine.load(
        demo_engine_directory,
        speculate="mtp",
        draft_length=3,
        prefix_cache=cache,
        memory=plan["weights_memory"] + plan["activations"] + cache + 3_500_000,
    )
    tokens = engine.tokenizer.encode(__doc__ * 40)
    used: list[int] = []

    async def one(front: AsyncEngine) -> None:
        await asyncio.sleep(float(rng.random()) * requests / 400)
        prompt = tokens[: int(rng.integers(1, 400))]
        params = SamplingParams(max_tokens=int(rng.integers(1, 60)), temperature=0)
        timeout = 0.05 if rng.random() < 0.1 else None
        leaves = int(rng.integers(1, 30)) if rng.random() < 0.2 else None
        count = 0
        stream = front.stream(prompt, params, scheduling=Scheduling(timeout=timeout))
        async for chunk in stream:
            count += chunk.token_id is not None
            used.append(engine.statistics().memory_used)
            if count == leaves:
                break
        await stream.aclose()

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            await asyncio.gather(*(one(front) for _ in range(requests)))
            await until(lambda: not engine.unfinished)

    asyncio.run(main())
    statistics = engine.statistics()
    assert max(used) > 0
    assert (statistics.running, statistics.waiting, statistics.memory_used) == (0, 0, 0)
    assert statistics.free_slots == engine.session.slots
    assert 0 < engine.cache_statistics().bytes <= cache
