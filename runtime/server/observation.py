# SPDX-License-Identifier: Apache-2.0
"""What happens to requests, counted as it happens."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from nemo_build.runtime.stopping import FinishReason

__all__ = ["RequestMetrics", "RequestTimer"]

_ARRIVALS = 32
"""How many arrivals of tokens are counted at once, as each would cost locks of its own."""

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "timeout",
    None: "error",
}
"""Values of the label ``finished_reason``; ``None`` is a request that failed."""


def _decades(first: int, last: int) -> tuple[float, ...]:
    """Bounds of buckets: 1, 2 and 5 times each power of ten."""
    return tuple(float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5))


_REQUEST_SECONDS = _decades(-3, 3)
_TOKEN_SECONDS = _decades(-4, 1)
_LENGTHS = _decades(0, 6)


class _BulkHistogram:
    """A histogram that takes many values at once; that of prometheus_client takes two locks for each.

    Args:
        name: Without prefix.
        text: What it is.
        bounds: Upper bounds of the buckets, ascending; one without a bound follows.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, values: Sequence[float]) -> None:
        """Count values."""
        with self._lock:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        """The metric as of now."""
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        buckets = list(zip([*map(str, self._bounds), "+Inf"], counts, strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total)


class RequestMetrics:
    """What is counted as it happens, by any thread.

    Args:
        context: Most tokens of a prompt and its answer.
    """

    def __init__(self, context: int) -> None:
        lengths = tuple(bound for bound in _LENGTHS if bound <= context)
        self._all: list[Counter | Histogram | _BulkHistogram] = []
        seconds, tokens = _REQUEST_SECONDS, _TOKEN_SECONDS
        histogram, counter = self._histogram, self._counter
        self.first_token_seconds = histogram("time_to_first_token_seconds", "Until the first token.", seconds)
        self.inter_token_seconds = _BulkHistogram(
            "inter_token_latency_seconds", "Between arrivals of tokens.", tokens
        )
        self._all.append(self.inter_token_seconds)
        self.output_token_seconds = histogram(
            "request_time_per_output_token_seconds",
            "A token after the first, on average of a request.",
            tokens,
        )
        self.request_seconds = histogram("e2e_request_latency_seconds", "From beginning to end.", seconds)
        self.queue_seconds = histogram("request_queue_time_seconds", "Waiting for a slot.", seconds)
        self.prefill_seconds = histogram("request_prefill_time_seconds", "From slot to first token.", seconds)
        self.decode_seconds = histogram("request_decode_time_seconds", "From first to last token.", seconds)
        self.inference_seconds = histogram("request_inference_time_seconds", "From slot to end.", seconds)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens of an answer.", lengths
        )
        self.max_tokens = histogram("request_params_max_tokens", "Tokens an answer may have.", lengths)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, cached ones included.")
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Tokens of prompts that came from the prefix cache."
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.aborted = counter("request_aborted", "Requests whose client went away.")
        self.finished = counter("request_success", "Requests that have ended.", "finished_reason")
        self.errors = counter("request_errors", "HTTP requests answered with an error.", "status")
        for reason in _REASONS.values():  # a rate can be told from the first on
            self.finished.labels(reason)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(name, text, registry=None, buckets=buckets)
        self._all.append(found)
        return found

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        found = Counter(name, text, labels, registry=None)
        self._all.append(found)
        return found

    def families(self) -> Iterator[Metric]:
        """All of them as of now; names are without prefix."""
        for metric in self._all:
            yield from metric.collect()


class RequestTimer:
    """What happens to one request. Methods are called in the order they stand in; :meth:`tokens` again and again.

    Args:
        metrics: Where it is counted.
        clock: Seconds.
        max_tokens: Tokens it may generate.

    Attributes:
        generated: Tokens so far.
        accepted: How many of them were drafts.
        first_token: Seconds until the first of them; ``None`` before.
        duration: Seconds until the end; ``None`` before.
    """

    __slots__ = (
        "_clock",
        "_counted",
        "_gaps",
        "_last",
        "_metrics",
        "_queued",
        "_start",
        "accepted",
        "duration",
        "first_token",
        "generated",
    )

    def __init__(self, metrics: RequestMetrics, clock: Callable[[], float], max_tokens: int) -> None:
        self._metrics, self._clock = metrics, clock
        self._start = self._last = clock()
        self._queued: float | None = None
        self._gaps: list[float] = []
        self._counted = 0
        self.generated = self.accepted = 0
        self.first_token: float | None = None
        self.duration: float | None = None
        metrics.max_tokens.observe(max_tokens)

    def begin(self, prompt_tokens: int, cached_tokens: int, queued: float | None = None) -> None:
        """The engine has begun with it.

        Args:
            prompt_tokens: Length of the prompt.
            cached_tokens: How many of these came from the prefix cache.
            queued: Seconds for which it waited for a slot; ``None``: unknown.
        """
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.cached_tokens.inc(cached_tokens)
        self._metrics.request_prompt_tokens.observe(prompt_tokens)
        self._queued = queued
        if queued is not None:
            self._metrics.queue_seconds.observe(queued)

    def tokens(self, count: int, accepted: int = 0) -> None:
        """So many tokens have arrived together, so many of which were drafts."""
        if not count:
            return
        now = self._clock()
        if self.first_token is None:
            self.first_token = now - self._start
            self._metrics.first_token_seconds.observe(self.first_token)
        else:
            self._gaps.append(now - self._last)
        self._last = now
        self.generated += count
        self.accepted += accepted
        if len(self._gaps) >= _ARRIVALS:
            self._count_arrivals()

    def finish(self, reason: FinishReason | None) -> None:
        """It has ended; ``None``: by an error. Only the first call counts."""
        if self.duration is not None:
            return
        self.duration = self._clock() - self._start
        self._count_arrivals()
        metrics = self._metrics
        metrics.finished.labels(_REASONS[reason]).inc()
        if reason is FinishReason.CANCELLED:
            metrics.aborted.inc()
        metrics.request_generation_tokens.observe(self.generated)
        metrics.request_seconds.observe(self.duration)
        if self._queued is not None:
            metrics.inference_seconds.observe(max(self.duration - self._queued, 0.0))
        if self.first_token is None:
            return
        if self._queued is not None:
            metrics.prefill_seconds.observe(max(self.first_token - self._queued, 0.0))
        decoded = self._last - self._start - self.first_token
        metrics.decode_seconds.observe(decoded)
        if self.generated > 1:
            metrics.output_token_seconds.observe(decoded / (self.generated - 1))

    def _count_arrivals(self) -> None:
        self._metrics.inter_token_seconds.observe(self._gaps)
        self._gaps.clear()
        self._metrics.generation_tokens.inc(self.generated - self._counted)
        self._counted = self.generated
