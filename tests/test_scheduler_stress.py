# SPDX-License-Identifier: Apache-2.0
"""The scheduler at random: texts do not depend on what runs beside them, nor on where a step is interrupted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_build.runtime.memory import SlotMemory
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.request import Request
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.runtime.speculation.rounds import Speculation
from nemo_build.runtime.stopping import FinishReason

from .toy_session import (
    END,
    ToySession,
    ToySpeculator,
    ToyTable,
    alone,
    prompt_of,
    request_of,
    run,
)


def interrupted(line: int) -> bool:
    """Interrupt steps when so many lines of the runtime have run; whether there are as many."""
    session = ToySession(2, pending=4, hidden=True)
    speculator = ToySpeculator(session, 0.7)
    states = [*session.states, *speculator.states]
    lookahead = speculator.lookahead
    cache = PrefixCache(states, capacity=1 << 20, pending=4, block=8, lookahead=lookahead)
    speculation = Speculation(speculator, 3, 2, watch_all=True)
    memory = SlotMemory(10 + 16 * 150, 10, 16)
    scheduler = Scheduler(session, speculation, cache=cache, memory=memory, token_budget=40)
    requests = [request_of([i] * (20 + 10 * i), priority=i % 2, timeout=1e9) for i in range(4)]
    for r in requests:
        scheduler.add(r)
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in ("scheduler.py", "steps.py", "request.py", "rounds.py"):
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        run(scheduler)
        return False
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    later = [request_of([i] * 25) for i in range(3)]
    for r in later:
        scheduler.add(r)
    run(scheduler)
    assert all(r.finished for r in requests), "nobody waits for ever"
    assert scheduler.statistics().free_slots == 2
    assert [r.output for r in later] == [alone([i] * 25) for i in range(3)]
    for r in requests:
        if r.finish_reason is not FinishReason.CANCELLED:
            assert r.output == alone(r.tokens[: r.prompt_tokens])
    return True


def test_steps_may_be_interrupted_anywhere(monkeypatch):
    # One may be interrupted between the two's notes of who is in a slot.
    release = lambda speculator, slot: speculator._tokens.pop(slot, None)  # noqa: E731
    monkeypatch.setattr(ToySpeculator, "release", release)
    line = 1
    while interrupted(line):
        line += 113
    assert line > 1000


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_texts_go_on_to_the_end_of_the_context(drafts):
    context, params = 24, SamplingParams(max_tokens=99, temperature=0, ignore_eos=True)
    prompts = [[i] * n for i, n in enumerate((1, 16, 22, 23, 24))]

    def serve(session: ToySession, speculation: Speculation | None = None) -> list[list[int]]:
        scheduler = Scheduler(session, speculation)
        requests = [Request(p, params, eos_ids=(END,), table=ToyTable(), context=context) for p in prompts]
        for r in requests:
            scheduler.add(r)
        run(scheduler)
        return [r.output for r in requests]

    session = ToySession(2, context, pending=drafts + 1 if drafts else 0, hidden=True)
    speculation = Speculation(ToySpeculator(session, 0.9), drafts, 2) if drafts else None
    outputs = serve(session, speculation)
    assert [len(o) for o in outputs] == [context - len(p) + 1 for p in prompts]
    assert outputs == serve(ToySession(1, context))


def build(rng: np.random.Generator, slots: int) -> tuple[Scheduler, PrefixCache | None]:
    """A scheduler of random sizes."""
    drafts = int(rng.choice([0, 1, 3, 7, 15]))
    cached = rng.random() < 0.6
    seconds = float(rng.choice([0, 0, 0, 0, 0, 0.0011]))  # enough for the next step to be prepared meanwhile
    session = ToySession(slots, pending=drafts + 1 if drafts else 0, hidden=bool(drafts), seconds=seconds)
    speculation = None
    if drafts:
        controller = DraftLengthController(drafts) if rng.random() < 0.5 else None
        speculator = ToySpeculator(session, float(rng.random()), confident=bool(rng.random() < 0.5))
        speculation = Speculation(speculator, drafts, slots, controller=controller, watch_all=cached)
    cache = None
    if cached:
        cache = PrefixCache(
            [*session.states, *(speculation.speculator.states if speculation else ())],
            capacity=int(rng.choice([2_000, 20_000, 1 << 20])),
            pending=session.pending,
            block=int(rng.choice([4, 16])),
            snapshot_every=int(rng.choice([0, 2])),
            lookahead=speculation.speculator.lookahead if speculation else {},
        )
    memory = SlotMemory(10 + 16 * 300, 10, 16) if rng.random() < 0.5 else None
    budget = int(rng.choice([1, 9, 40, 512]))
    return Scheduler(session, speculation, cache=cache, memory=memory, token_budget=budget), cache


def stress(seed: int, slots: int, steps: int) -> int:
    """Requests come, go and are taken from their slots at random; every text is what it is alone. Steps run."""
    rng = np.random.default_rng([seed, slots])
    scheduler, cache = build(rng, slots)
    common = prompt_of(rng, 90)
    live: list[Request] = []
    done = 0
    while done < steps or scheduler.unfinished:
        if done < steps and rng.random() < 0.3 and len(live) < 3 * slots:
            prompt = common[: int(rng.integers(0, len(common) + 1))] + prompt_of(rng)
            temperature = float(rng.choice([0, 0.8]))
            penalty = float(rng.choice([1, 1.3]))
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 40)),
                temperature=temperature,
                seed=int(rng.integers(99)),
                repetition_penalty=penalty,
                stop=("Q",) if rng.random() < 0.2 else (),
            )
            chunk, salt = int(rng.integers(1, 70)), int(rng.integers(2))
            live.append(
                request_of(prompt, params, priority=int(rng.integers(3)), prefill_chunk=chunk, salt=salt)
            )
            scheduler.add(live[-1])
        if live and rng.random() < 0.03:
            scheduler.cancel(live[int(rng.integers(len(live)))])
        scheduler.step()
        done += 1
        for r in [r for r in live if r.finished]:
            live.remove(r)
            assert r.error is None
            want = alone(r.tokens[: r.prompt_tokens], r.params)
            whole = r.finish_reason is not FinishReason.CANCELLED
            assert r.output == (want if whole else want[: len(r.output)])
            assert [e.token for e in r.events if e.token is not None] == r.output
    statistics = scheduler.statistics()
    assert (statistics.running, statistics.waiting, statistics.free_slots) == (0, 0, slots)
    assert statistics.memory_used == 0
    if cache is not None:
        cache.clear()
        assert cache.statistics().bytes == 0
    return done


@pytest.mark.parametrize("slots", [1, 3, 8, 16])
@pytest.mark.parametrize("seed", range(6))
def test_texts_do_not_depend_on_what_runs_beside_them(seed, slots):
    stress(seed, slots, 250)


@pytest.mark.slow
def test_thousands_of_steps():
    assert sum(stress(seed, 1 + seed % 16, 1000) for seed in range(100, 132)) > 30_000
