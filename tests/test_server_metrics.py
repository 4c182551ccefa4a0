# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told: by hand-made numbers, and by an engine that generates."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from prometheus_client.parser import text_string_to_metric_families

from nemo_build import __version__
from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.errors import UserError
from nemo_build.runtime import Engine, FinishReason, SamplingParams, Scheduling
from nemo_build.runtime.prefix_cache import PrefixCacheStatistics
from nemo_build.runtime.scheduler import SchedulerStatistics
from nemo_build.runtime.server.backend import EngineBackend, Statistics
from nemo_build.runtime.server.metrics import ALIASES, PREFIX, Metrics
from nemo_build.runtime.speculation.acceptance import Acceptance

STATISTICS = Statistics(
    SchedulerStatistics(
        running=2,
        waiting=5,
        steps=70,
        preemptions=3,
        free_slots=2,
        memory_used=0,
        failed=1,
        memory_total=0,
        positions=400,
    ),
    PrefixCacheStatistics(
        queries=9, hits=4, queried_tokens=900, saved_tokens=300, row_bytes=10, snapshot_bytes=7
    ),
    Acceptance(steps=10, drafted=[10, 8], accepted=[7, 3]),
)


class Clock:
    """Seconds that pass when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def backend(statistics: Statistics = STATISTICS, speculator: str | None = "mtp") -> SimpleNamespace:
    return SimpleNamespace(
        target="cpu", speculator=speculator, context=1000, slots=4, statistics=lambda: statistics
    )


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and its labels; the model's name is in all of ours, and left out."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for s in family.samples:
            labels = dict(s.labels)
            if not s.name.startswith(("process_", "python_")):
                assert labels.pop("model_name") == "lightning", s
            key = s.name, frozenset(labels.items())
            assert key not in samples, key
            samples[key] = s.value
    return samples


def value(samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_what_the_backend_tells():
    samples = scrape(Metrics(backend(), "lightning"))
    want = {
        "num_requests_running": 2,
        "num_requests_waiting": 5,
        "num_slots": 4,
        "num_slots_used": 2,
        "kv_cache_usage_perc": 400 / 4000,
        "num_preemptions_total": 3,
        "engine_steps_total": 70,
        "engine_failures_total": 1,
        "prefix_cache_queries_total": 900,
        "prefix_cache_hits_total": 300,
        "prefix_cache_lookups_total": 9,
        "prefix_cache_lookup_hits_total": 4,
        "prefix_cache_bytes": 17,
        "spec_decode_num_drafts_total": 10,
        "spec_decode_num_draft_tokens_total": 18,
        "spec_decode_num_accepted_tokens_total": 10,
    }
    for name, number in want.items():
        assert value(samples, PREFIX + name) == pytest.approx(number), name
    assert value(samples, "nemo:spec_decode_num_accepted_tokens_per_pos_total", position="0") == 7
    assert value(samples, "nemo:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 3
    assert value(samples, "nemo:spec_decode_acceptance_length", speculator="mtp") == 2
    assert value(samples, "nemo:build_info", version=__version__, target="cpu", speculator="mtp") == 1
    assert value(samples, "process_resident_memory_bytes") > 1_000_000


def test_use_of_memory_where_that_is_the_limit():
    limited = SchedulerStatistics(2, 0, 0, 0, 2, 30, 0, memory_total=120, positions=400)
    samples = scrape(Metrics(backend(Statistics(limited), None), "lightning"))
    assert value(samples, "nemo:kv_cache_usage_perc") == 0.25
    assert value(samples, "nemo:state_memory_used_bytes") == 30
    assert value(samples, "nemo:state_memory_limit_bytes") == 120
    assert value(samples, "nemo:spec_decode_acceptance_length", speculator="none") == 1


def test_a_request():
    clock = Clock()
    metrics = Metrics(backend(), "lightning", clock=clock)
    timer = metrics.start(max_tokens=50)
    clock.now += 2.0
    timer.begin(prompt_tokens=30, cached_tokens=20, queued=0.5)
    timer.tokens(1)
    clock.now += 0.25
    timer.tokens(3, accepted=2)
    timer.tokens(0)
    clock.now += 0.75
    timer.tokens(1)
    clock.now += 1.0
    assert value(scrape(metrics), "nemo:time_to_first_token_seconds_count") == 1
    timer.finish(FinishReason.STOP)
    clock.now += 9.0
    timer.finish(FinishReason.CANCELLED)  # the client's stream is closed behind its end

    assert (timer.generated, timer.accepted, timer.first_token, timer.duration) == (5, 2, 2.0, 4.0)
    samples = scrape(metrics)
    sums = {
        "time_to_first_token_seconds": (1, 2.0),
        "inter_token_latency_seconds": (2, 1.0),
        "request_time_per_output_token_seconds": (1, 0.25),
        "e2e_request_latency_seconds": (1, 4.0),
        "request_queue_time_seconds": (1, 0.5),
        "request_prefill_time_seconds": (1, 1.5),
        "request_decode_time_seconds": (1, 1.0),
        "request_inference_time_seconds": (1, 3.5),
        "request_prompt_tokens": (1, 30),
        "request_generation_tokens": (1, 5),
        "request_params_max_tokens": (1, 50),
    }
    for name, (count, total) in sums.items():
        assert value(samples, f"nemo:{name}_count") == count, name
        assert value(samples, f"nemo:{name}_sum") == pytest.approx(total), name
    assert value(samples, "nemo:prompt_tokens_total") == 30
    assert value(samples, "nemo:prompt_tokens_cached_total") == 20
    assert value(samples, "nemo:generation_tokens_total") == 5
    assert value(samples, "nemo:request_success_total", finished_reason="stop") == 1
    assert value(samples, "nemo:request_success_total", finished_reason="abort") == 0
    assert value(samples, "nemo:request_aborted_total") == 0


@pytest.mark.parametrize("reason", [*FinishReason, None])
def test_a_request_that_ends_before_its_first_token(reason):
    metrics = Metrics(backend(), "lightning")
    metrics.start(1).finish(reason)
    samples = scrape(metrics)
    label = {"cancelled": "abort", None: "error"}.get(reason, reason)
    assert value(samples, "nemo:request_success_total", finished_reason=str(label)) == 1
    assert value(samples, "nemo:request_aborted_total") == (reason == FinishReason.CANCELLED)
    assert value(samples, "nemo:e2e_request_latency_seconds_count") == 1
    for name in (
        "time_to_first_token",
        "request_queue_time",
        "request_decode_time",
        "request_inference_time",
    ):
        assert value(samples, f"nemo:{name}_seconds_count") == 0, name


def test_long_answers_are_counted_while_they_come():
    clock = Clock()
    metrics = Metrics(backend(), "lightning", clock=clock)
    timer = metrics.start(1000)
    for _ in range(100):
        clock.now += 0.002
        timer.tokens(1)
    samples = scrape(metrics)
    assert 60 < value(samples, "nemo:generation_tokens_total") <= 100
    timer.finish(FinishReason.LENGTH)
    samples = scrape(metrics)
    assert value(samples, "nemo:generation_tokens_total") == 100
    assert value(samples, "nemo:inter_token_latency_seconds_sum") == pytest.approx(99 * 0.002)
    assert value(samples, "nemo:inter_token_latency_seconds_bucket", le="0.001") == 0
    assert value(samples, "nemo:inter_token_latency_seconds_bucket", le="0.005") == 99
    assert value(samples, "nemo:inter_token_latency_seconds_bucket", le="+Inf") == 99


def test_errors_by_status():
    metrics = Metrics(backend(), "lightning")
    for status in (400, 429, 400):
        metrics.count_error(status)
    samples = scrape(metrics)
    assert value(samples, "nemo:request_errors_total", status="400") == 2
    assert value(samples, "nemo:request_errors_total", status="429") == 1


def test_no_bucket_is_longer_than_the_context():
    bounds = {
        dict(labels).get("le")
        for name, labels in scrape(Metrics(backend(), "lightning"))
        if "prompt_tokens_b" in name
    }
    assert bounds == {
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "100.0",
        "200.0",
        "500.0",
        "1000.0",
        "+Inf",
    }


def test_names_of_another_server():
    alias = ALIASES["vllm"]
    metrics = Metrics(backend(), "lightning", alias="vllm")
    metrics.start(1).finish(FinishReason.LENGTH)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    for name in alias.names:
        ours, theirs = families[PREFIX + name], families[alias.prefix + name]
        assert theirs.type == ours.type
        assert [(s.name.removeprefix(alias.prefix), s.value) for s in theirs.samples] == [
            (s.name.removeprefix(PREFIX), s.value) for s in ours.samples
        ]
        assert all(
            s.labels["model_name"] == "lightning" and s.labels["engine"] == "0" for s in theirs.samples
        )
    assert {name for name in families if name.startswith("vllm:")} == {f"vllm:{n}" for n in alias.names}


def test_what_dashboards_for_vllm_read():
    """The metrics in the dashboard of vLLM's repository, under the names of its engine V1."""
    read = [
        "e2e_request_latency_seconds_bucket",
        "e2e_request_latency_seconds_sum",
        "prompt_tokens_total",
        "generation_tokens_total",
        "inter_token_latency_seconds_bucket",
        "num_requests_running",
        "num_requests_waiting",
        "time_to_first_token_seconds_bucket",
        "kv_cache_usage_perc",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "request_success_total",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_num_drafts_total",
        "num_preemptions_total",
    ]
    names = {name for name, _ in scrape(Metrics(backend(), "lightning", alias="vllm"))}
    assert {f"vllm:{name}" for name in read} <= names


def test_there_is_no_such_alias():
    with pytest.raises(UserError, match="vllm"):
        Metrics(backend(), "lightning", alias="tgi")


def test_servers_in_one_process_do_not_meet():
    first, second = (Metrics(backend(), "lightning") for _ in range(2))
    first.count_error(400)
    assert ("nemo:request_errors_total", frozenset({("status", "400")})) not in scrape(second)


def test_nothing_is_lost_between_threads():
    metrics = Metrics(backend(), "lightning")

    def serve() -> None:
        for _ in range(50):
            timer = metrics.start(10)
            timer.begin(3, 0, 0.0)
            for _ in range(40):
                timer.tokens(2, 1)
            timer.finish(FinishReason.LENGTH)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.render()
    for thread in threads:
        thread.join()
    samples = scrape(metrics)
    assert value(samples, "nemo:generation_tokens_total") == 4 * 50 * 80
    assert value(samples, "nemo:inter_token_latency_seconds_count") == 4 * 50 * 39


def test_an_engine_with_little_memory_tells_how_much_there_is(demo_engine_directory):
    plan = read_manifest(demo_engine_directory, ENGINE_BUNDLE)["plan"]
    room = 3_500_000
    engine = Engine.load(demo_engine_directory, memory=plan["weights_memory"] + plan["activations"] + room)
    stream = engine.stream("import os\n", SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    next(stream)
    scheduler = engine.statistics()
    assert scheduler.memory_total == room
    share = scheduler.memory_used / room
    assert 0 < share < 1
    assert value(scrape(Metrics(EngineBackend(engine), "lightning")), "nemo:kv_cache_usage_perc") == share
    stream.close()


def test_an_engine_that_generates(demo_engine_directory):
    engine = Engine.load(
        demo_engine_directory, max_sequences=2, speculate="mtp", draft_length=2, prefix_cache=1 << 24
    )
    served = EngineBackend(engine, speculate="mtp")
    metrics = Metrics(served, "lightning", alias="vllm")
    prompt = engine.tokenizer.encode("import os\nimport sys\n" * 40)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    seen = []

    async def ask() -> None:
        timer = metrics.start(params.max_tokens)
        async for piece in served.stream(prompt, params, Scheduling()):
            if piece.prompt_tokens is not None:
                timer.begin(piece.prompt_tokens, piece.cached_tokens or 0, piece.queued)
                seen.append(scrape(metrics))
            timer.tokens(piece.token_id is not None, piece.drafted)
            if piece.finish_reason is not None:
                timer.finish(piece.finish_reason)

    async def main() -> None:
        await served.start()
        try:
            await ask()
            await asyncio.gather(*(ask() for _ in range(3)))
        finally:
            await served.close()

    asyncio.run(main())
    assert value(seen[0], "nemo:num_slots_used") == value(seen[0], "nemo:num_requests_running") == 1
    used = value(seen[0], "nemo:kv_cache_usage_perc") * 2 * served.context
    assert len(prompt) <= round(used) < len(prompt) + params.max_tokens
    samples = scrape(metrics)
    assert value(samples, "nemo:num_slots_used") == value(samples, "nemo:kv_cache_usage_perc") == 0
    assert value(samples, "nemo:request_success_total", finished_reason="length") == 4
    assert value(samples, "nemo:generation_tokens_total") == 4 * 24
    assert value(samples, "nemo:prompt_tokens_total") == 4 * len(prompt)
    assert value(samples, "nemo:request_queue_time_seconds_count") == 4
    waited, whole = (
        value(samples, f"nemo:{name}_seconds_sum") for name in ("request_queue_time", "e2e_request_latency")
    )
    assert 0 < waited < whole, "two have a slot, so a third waits"
    assert value(samples, "nemo:prompt_tokens_cached_total") == engine.cache_statistics().saved_tokens > 0
    accepted = value(samples, "nemo:spec_decode_num_accepted_tokens_total")
    assert accepted == sum(engine.acceptance.accepted) > 0
    drafts = value(samples, "nemo:spec_decode_num_drafts_total")
    assert value(samples, "nemo:spec_decode_acceptance_length", speculator="mtp") == 1 + accepted / drafts
    assert value(samples, "vllm:spec_decode_num_accepted_tokens_total", engine="0") == accepted
