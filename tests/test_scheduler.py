# SPDX-License-Identifier: Apache-2.0
"""The scheduler on a target that shows every mistake."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from nemo_build.errors import RequestError
from nemo_build.runtime.memory import SlotMemory
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.request import Request, Scheduling
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.speculation.lookup import LookupSpeculator
from nemo_build.runtime.speculation.rounds import Speculation
from nemo_build.runtime.stopping import FinishReason, StopState

from .toy_session import (
    END,
    Clock,
    ToySession,
    ToySpeculator,
    alone,
    prompt_of,
    request_of,
    row_of,
    run,
)


def test_the_toy_is_what_it_says():
    prompt, tokens = [3, 1, 4], []
    while len(tokens) < 12 and END not in tokens:
        tokens.append(int(row_of(prompt + tokens).argmax()))
    assert alone(prompt) == tokens


def test_first_come_first_served_and_all_are_served():
    scheduler = Scheduler(ToySession(2))
    rng = np.random.default_rng(0)
    requests = [request_of(prompt_of(rng)) for _ in range(9)]
    for r in requests:
        scheduler.add(r)
    ended: list[Request] = []
    while scheduler.unfinished:
        scheduler.step()
        ended += [r for r in requests if r.finished and r not in ended]
        running = [r for r in requests if r.slot is not None]
        assert len(running) <= 2
        assert all(requests.index(r) <= len(ended) + 1 for r in running)
    assert [r.output for r in requests] == [alone(r.tokens[: r.prompt_tokens]) for r in requests]
    assert scheduler.statistics().free_slots == 2


@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_a_step_keeps_to_its_budget_and_decoding_goes_on(budget):
    session = ToySession(4)
    scheduler = Scheduler(session, token_budget=budget)
    first = request_of([1], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    scheduler.add(first)
    scheduler.step()
    scheduler.step()
    long = [request_of([i] * 90, prefill_chunk=40) for i in range(3)]
    for r in long:
        scheduler.add(r)
    for _ in range(20):
        before = len(first.output)
        session.steps.clear()
        scheduler.step()
        assert len(first.output) == before + 1, "prompts do not hold up who decodes"
        prefill = max(budget - 1, budget // 4, 1)
        assert session.steps[0].input_ids.size <= sum(r.decoding for r in long) + 1
        assert all(batch.input_ids.size <= prefill for batch in session.steps[1:])
    run(scheduler)
    assert [r.output for r in long] == [alone([i] * 90) for i in range(3)]


def test_priority_takes_a_slot_and_the_victim_goes_on_as_if_nothing_was():
    clock = Clock()
    scheduler = Scheduler(ToySession(1), clock=clock)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    low = request_of([5, 6, 7], params)
    scheduler.add(low)
    for _ in range(5):
        scheduler.step()
    high, equal = request_of([8, 9], priority=1), request_of([1, 2])
    scheduler.add(equal)
    scheduler.step()
    assert low.slot is not None, "an equal one waits"
    scheduler.add(high)
    scheduler.step()
    assert (low.slot, high.slot) == (None, 0)
    run(scheduler)
    assert low.output == alone([5, 6, 7], params)
    assert high.output == alone([8, 9])
    assert scheduler.statistics().preemptions == 1


def test_one_that_waited_long_is_not_overtaken():
    clock = Clock()
    scheduler = Scheduler(ToySession(1), clock=clock)
    running, old = request_of([1] * 30), request_of([2])
    scheduler.add(running)
    scheduler.step()
    scheduler.add(old)
    clock.now = 11.0
    new = request_of([3], priority=1)
    scheduler.add(new)
    while not (old.output or new.output):
        scheduler.step()
    assert old.output
    assert not new.output


@pytest.mark.parametrize("waits", [True, False])
def test_time_is_over(waits):
    clock = Clock()
    scheduler = Scheduler(ToySession(1), clock=clock)
    other = request_of([1] * 9)
    request = request_of([2, 3], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True), timeout=5)
    for r in (other, request) if waits else (request, other):
        scheduler.add(r)
    scheduler.step()
    scheduler.step()
    clock.now = 4.9
    scheduler.step()
    assert not request.finished
    clock.now = 5.0
    scheduler.step()
    assert request.finish_reason is FinishReason.TIMEOUT
    assert request.events[-1].token is None
    assert request.events[-1].text.finish_reason is FinishReason.TIMEOUT
    run(scheduler)
    assert other.output == alone([1] * 9)
    with pytest.raises(RequestError, match="timeout is 0"):
        Scheduling(timeout=0)


def test_requests_that_have_ended_are_forgotten_long_before_their_time_is_over():
    scheduler = Scheduler(ToySession(2))
    for _ in range(300):
        scheduler.add(request_of([1, 2], SamplingParams(max_tokens=1, temperature=0), timeout=1e9))
        run(scheduler)
    assert len(scheduler._timeouts) < 100


def test_cancelling_frees_the_slot_within_a_step():
    scheduler = Scheduler(ToySession(1))
    request, other = request_of([1, 2]), request_of([3])
    scheduler.add(request)
    scheduler.step()
    scheduler.add(other)
    scheduler.cancel(request)
    scheduler.step()
    assert request.finish_reason is FinishReason.CANCELLED
    assert other.slot == 0
    scheduler.cancel(request)  # once more changes nothing
    run(scheduler)
    assert other.output == alone([3])


def test_a_step_that_fails_ends_what_ran_and_the_rest_goes_on():
    session = ToySession(2)
    scheduler = Scheduler(session)
    requests = [request_of([i, i]) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    scheduler.step()
    session.fails = lambda: True
    with pytest.raises(RuntimeError, match="the device is gone"):
        scheduler.step()
    assert [str(r.error) for r in requests] == ["the device is gone", "the device is gone", "None"]
    session.fails = bool
    run(scheduler)
    assert requests[2].output == alone([2, 2])
    assert scheduler.statistics().free_slots == 2


def test_who_cannot_even_be_started_is_told(monkeypatch):
    session = ToySession(1)
    cache = PrefixCache(session.states, capacity=1 << 20)
    scheduler, request = Scheduler(session, cache=cache), request_of([1, 2])
    monkeypatch.setattr(cache, "restore", lambda *args: 1 / 0)
    scheduler.add(request)
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert isinstance(request.error, ZeroDivisionError)
    assert not scheduler.unfinished
    assert scheduler.statistics().free_slots == 1


def test_requests_run_as_far_as_memory_goes():
    """Four slots, memory for about one and a half contexts: nobody fails, all get what they get alone."""
    memory = SlotMemory(total=10 + 16 * 240, fixed=10, per_position=16)
    scheduler = Scheduler(ToySession(4), memory=memory)
    params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    prompts = [[i] * n for i, n in enumerate((5, 100, 30, 60, 7))]
    requests = [request_of(p, params) for p in prompts]
    for r in requests:
        scheduler.add(r)
    most = 0
    while scheduler.unfinished:
        scheduler.step()
        statistics = scheduler.statistics()
        most = max(most, statistics.running)
        assert statistics.memory_used <= memory.total
    assert most > 1
    assert scheduler.statistics().preemptions > 0
    assert [r.output for r in requests] == [alone(p, params) for p in prompts]


@pytest.mark.parametrize("pending", [0, 5])
def test_a_preempted_request_comes_back_from_the_cache(pending):
    session = ToySession(1, pending=pending)
    speculation = None
    if pending:
        session = ToySession(1, pending=pending, hidden=True)
        speculation = Speculation(ToySpeculator(session, 0.7), 4, 1, watch_all=True)
    states = [*session.states, *(speculation.speculator.states if speculation else ())]
    lookahead = speculation.speculator.lookahead if speculation else {}
    cache = PrefixCache(states, capacity=1 << 20, pending=pending, block=8, lookahead=lookahead)
    scheduler = Scheduler(session, speculation, cache=cache)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    low = request_of(list(range(20)), params)
    scheduler.add(low)
    while len(low.output) < 12:
        scheduler.step()
    high = request_of([8, 9], priority=1)
    scheduler.add(high)
    scheduler.step()
    assert low.slot is None
    session.steps.clear()
    run(scheduler)
    assert low.output == alone(list(range(20)), params)
    fed = sum(int(b.lengths.sum()) for b in session.steps)
    assert fed < 20 + 30, "what was kept is not computed again"


def test_who_is_preempted_for_memory_is_not_taken_back_in_the_same_step():
    session = ToySession(16, pending=16, hidden=True)
    speculation = Speculation(ToySpeculator(session, 0.3), 15, 16)
    scheduler = Scheduler(session, speculation, memory=SlotMemory(16 * 16 * 110, 10, 16))
    params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    requests = [request_of([i] * (60 + i % 7), params) for i in range(24)]
    for r in requests:
        scheduler.add(r)
    while scheduler.unfinished:
        before = {r for r in requests if r.slot is not None}
        preemptions = scheduler.statistics().preemptions
        scheduler.step()
        left = {r for r in before if r.slot is None and not r.finished}
        assert len(left) == scheduler.statistics().preemptions - preemptions
    assert scheduler.statistics().preemptions > 0
    assert requests[-1].output == alone(requests[-1].tokens[: requests[-1].prompt_tokens], params)


@pytest.mark.parametrize("drafting", ["token", "block"])
def test_drafts_of_no_distribution_can_be_verified_by_rejection_too(drafting):
    session = ToySession(2, pending=4)
    scheduler = Scheduler(session, Speculation(LookupSpeculator(), 3, 2, drafting=drafting))
    params = SamplingParams(max_tokens=30, seed=1, logit_bias={5: 50, 6: 50})
    requests = [request_of([i, 5, 6] * 5, params) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    run(scheduler)
    assert scheduler.acceptance.steps > 0
    assert [r.output for r in requests] == [alone([i, 5, 6] * 5, params) for i in range(3)]


def test_a_salt_that_cannot_be_told_from_others_is_refused():
    with pytest.raises(RequestError, match="unhashable"):
        Scheduling(salt=["tenant"])


@pytest.mark.parametrize("ends", ["by itself", "from outside"])
def test_who_sees_that_a_request_has_ended_finds_its_last_event(ends, monkeypatch):
    """Readers look from other threads, at any moment."""
    seen: list[bool] = []

    def watched(method: Any) -> Any:
        def call(state: StopState, *args: Any, **options: Any) -> Any:
            text = method(state, *args, **options)
            seen.append(request.finished)
            return text

        return call

    monkeypatch.setattr(StopState, "push", watched(StopState.push))
    monkeypatch.setattr(StopState, "cancel", watched(StopState.cancel))
    scheduler, request = Scheduler(ToySession(1)), request_of([1, 2])
    scheduler.add(request)
    scheduler.step()
    if ends == "from outside":
        scheduler.cancel(request)
    run(scheduler)
    assert request.finished
    assert not any(seen)


def test_a_slot_is_left_alone_while_an_interrupted_step_still_computes():
    session = ToySession(1)
    cache = PrefixCache(session.states, capacity=1 << 20, block=4)
    scheduler, prompt = Scheduler(session, cache=cache), list(range(30))
    scheduler.add(request_of(prompt))
    run(scheduler)
    scheduler.add(request_of([7] * 29))
    scheduler.step()
    scheduler.step()
    scheduler._runner._seconds = 1.0  # so that the next one is computed in a thread
    session._seconds = 0.2

    def interrupt() -> bool:
        session.fails = bool
        time.sleep(0.05)  # until the other thread waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return False

    session.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    session._seconds = 0.0
    request = request_of([*prompt, 3])
    scheduler.add(request)
    run(scheduler)
    assert request.cached_tokens == 30
    assert request.output == alone([*prompt, 3])
