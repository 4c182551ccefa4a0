# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus, under the names that dashboards of inference servers know.

A metric is called ``nemo:`` and what vLLM calls the same thing behind its own prefix; :data:`ALIASES` has the prefixes
under which it is exported besides. What happens to requests is counted as it happens
(:mod:`~nemo_build.runtime.server.observation`); what the engine knows is asked of the backend at each scrape.

Three definitions that names do not tell:

- A request here is an answer of its own: ``n`` choices of one HTTP request are ``n``.
- ``inter_token_latency_seconds`` is the time between arrivals. The tokens that a step gives to a sequence arrive
  together, so accepted drafts are not arrivals of their own; ``request_time_per_output_token_seconds`` has them in it.
- ``kv_cache_usage_perc`` is a fraction of 1: of the bytes for state where memory limits what runs, or else of the
  positions of all slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nemo_build import __version__
from nemo_build.errors import UserError
from nemo_build.runtime.server.backend import Backend, Statistics
from nemo_build.runtime.server.observation import RequestMetrics, RequestTimer

__all__ = ["ALIASES", "CONTENT_TYPE", "PREFIX", "Alias", "Metrics"]

PREFIX = "nemo:"
"""What all names of ours begin with."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what :meth:`Metrics.render` gives."""


@dataclass(frozen=True)
class Alias:
    """Names of another server for metrics that it has too.

    Attributes:
        prefix: What they begin with.
        labels: Labels that it has besides ours, with their values.
        names: The metrics it has, without prefix and without ``_total``.
    """

    prefix: str
    labels: Mapping[str, str]
    names: frozenset[str]


ALIASES = {
    "vllm": Alias(
        "vllm:",
        {"engine": "0"},
        frozenset(
            {
                "e2e_request_latency_seconds",
                "generation_tokens",
                "inter_token_latency_seconds",
                "kv_cache_usage_perc",
                "num_preemptions",
                "num_requests_running",
                "num_requests_waiting",
                "prefix_cache_hits",
                "prefix_cache_queries",
                "prompt_tokens",
                "request_decode_time_seconds",
                "request_generation_tokens",
                "request_inference_time_seconds",
                "request_params_max_tokens",
                "request_prefill_time_seconds",
                "request_prompt_tokens",
                "request_queue_time_seconds",
                "request_success",
                "request_time_per_output_token_seconds",
                "spec_decode_num_accepted_tokens",
                "spec_decode_num_accepted_tokens_per_pos",
                "spec_decode_num_draft_tokens",
                "spec_decode_num_drafts",
                "time_to_first_token_seconds",
            }
        ),
    )
}
"""By the name that users give (vLLM's documentation, "Production Metrics")."""


@dataclass(frozen=True)
class _Figure:
    """A number that the backend tells.

    Attributes:
        name: Without prefix, and without the ``_total`` of counters.
        text: What it is.
        value: Takes it from the backend's statistics.
        counts: Whether it only grows.
    """

    name: str
    text: str
    value: Callable[[Statistics], float]
    counts: bool = False

    def family(self, statistics: Statistics) -> Metric:
        """The metric as of now."""
        kind = CounterMetricFamily if self.counts else GaugeMetricFamily
        return kind(self.name, self.text, value=self.value(statistics))


_FIGURES = (
    _Figure("num_requests_running", "Requests that have a slot.", lambda s: s.scheduler.running),
    _Figure("num_requests_waiting", "Requests that wait for a slot.", lambda s: s.scheduler.waiting),
    _Figure(
        "state_memory_used_bytes",
        "Bytes of state in use; 0 without a limit.",
        lambda s: s.scheduler.memory_used,
    ),
    _Figure(
        "state_memory_limit_bytes", "Bytes for state; 0 without a limit.", lambda s: s.scheduler.memory_total
    ),
    _Figure("num_preemptions", "How often a request lost its slot.", lambda s: s.scheduler.preemptions, True),
    _Figure("engine_steps", "Steps of the scheduler.", lambda s: s.scheduler.steps, True),
    _Figure(
        "engine_failures", "Requests that ended with a step that failed.", lambda s: s.scheduler.failed, True
    ),
    _Figure("prefix_cache_queries", "Prompt tokens looked up in it.", lambda s: s.cache.queried_tokens, True),
    _Figure("prefix_cache_hits", "Prompt tokens that came from it.", lambda s: s.cache.saved_tokens, True),
    _Figure("prefix_cache_lookups", "Prompts looked up in it.", lambda s: s.cache.queries, True),
    _Figure("prefix_cache_lookup_hits", "Prompts of which it had a part.", lambda s: s.cache.hits, True),
    _Figure("prefix_cache_refusals", "Times it had no room.", lambda s: s.cache.refused, True),
    _Figure("prefix_cache_evicted_blocks", "Blocks it gave up.", lambda s: s.cache.evicted_blocks, True),
    _Figure(
        "prefix_cache_evicted_snapshots", "Snapshots it gave up.", lambda s: s.cache.evicted_snapshots, True
    ),
    _Figure("prefix_cache_bytes", "Bytes it holds.", lambda s: s.cache.bytes),
    _Figure("prefix_cache_snapshots", "Recurrent states it holds.", lambda s: s.cache.snapshots),
    _Figure("spec_decode_num_drafts", "Runs of drafts that were judged.", lambda s: s.acceptance.steps, True),
    _Figure(
        "spec_decode_num_draft_tokens", "Drafts that were judged.", lambda s: sum(s.acceptance.drafted), True
    ),
    _Figure(
        "spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: sum(s.acceptance.accepted), True
    ),
)


class Metrics:
    """All metrics of a server, in a registry of its own.

    Args:
        backend: What it generates with.
        model: The name it is served under.
        alias: A name of :data:`ALIASES`, to export those names too.
        clock: Seconds, for what requests take.

    Attributes:
        registry: Where to add more.

    Raises:
        UserError: There is no such alias.
    """

    def __init__(
        self,
        backend: Backend,
        model: str,
        *,
        alias: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if alias is not None and alias not in ALIASES:
            raise UserError(f"There are no metrics of {alias!r}.", hint=f"Known: {', '.join(ALIASES)}.")
        self.clock = clock
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(backend.context)
        ProcessCollector(registry=self.registry)
        self.registry.register(
            _Exporter(self.requests, backend, model, None if alias is None else ALIASES[alias])
        )

    def render(self) -> bytes:
        """Everything, in Prometheus' text format; see :data:`CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def start(self, max_tokens: int) -> RequestTimer:
        """A request has come that may generate so many tokens."""
        return RequestTimer(self.requests, self.clock, max_tokens)

    def count_error(self, status: int) -> None:
        """A request was answered with an error, of this HTTP status."""
        self.requests.errors.labels(str(status)).inc()


class _Exporter(Collector):
    """Puts prefix and labels to what was counted and what the backend tells, at each scrape."""

    def __init__(self, requests: RequestMetrics, backend: Backend, model: str, alias: Alias | None) -> None:
        self._requests, self._backend, self._alias = requests, backend, alias
        self._labels = {"model_name": model}

    def collect(self) -> Iterator[Metric]:
        """Every metric under our name, and under that of the alias if it has it."""
        alias = self._alias
        for family in (*self._requests.families(), *self._engine()):
            yield _exported(family, PREFIX, self._labels)
            if alias is not None and family.name in alias.names:
                yield _exported(family, alias.prefix, {**self._labels, **alias.labels})

    def _engine(self) -> Iterator[Metric]:
        backend, statistics = self._backend, self._backend.statistics()
        speculator = backend.speculator or "none"
        build = {"version": __version__, "target": backend.target, "speculator": speculator}
        yield InfoMetricFamily("build", "What is served.", build)
        for figure in _FIGURES:
            yield figure.family(statistics)
        yield GaugeMetricFamily("num_slots", "Sequences at a time.", value=backend.slots)
        used = backend.slots - statistics.scheduler.free_slots
        yield GaugeMetricFamily("num_slots_used", "Slots that a request has.", value=used)
        share = _usage(statistics, backend.slots * backend.context)
        yield GaugeMetricFamily(
            "kv_cache_usage_perc", "Use of the state's memory or positions, 0 to 1.", value=share
        )
        length = GaugeMetricFamily(
            "spec_decode_acceptance_length", "Tokens of a verification on average.", labels=["speculator"]
        )
        length.add_metric([speculator], statistics.acceptance.length)
        yield length
        places = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by place from 0.",
            labels=["position"],
        )
        for place, accepted in enumerate(statistics.acceptance.accepted):
            places.add_metric([str(place)], accepted)
        yield places


def _usage(statistics: Statistics, positions: int) -> float:
    """How much of what can be in use is, 0 to 1."""
    scheduler = statistics.scheduler
    if scheduler.memory_total:
        return scheduler.memory_used / scheduler.memory_total
    return scheduler.positions / positions


def _exported(family: Metric, prefix: str, labels: Mapping[str, str]) -> Metric:
    """A metric with a prefix to its names, and these labels before its own."""
    metric = Metric(prefix + family.name, family.documentation, family.type)
    for sample in family.samples:
        if not sample.name.endswith("_created"):  # Prometheus shows each as a metric of its own
            metric.add_sample(prefix + sample.name, {**labels, **sample.labels}, sample.value)
    return metric
