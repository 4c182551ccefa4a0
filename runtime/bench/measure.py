# SPDX-License-Identifier: Apache-2.0
"""Statistics: latencies and throughput of a run's traces, and what came of drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from nemo_build.runtime.bench.load import Trace
from nemo_build.runtime.speculation.acceptance import Acceptance

PERCENTILES = (50, 90, 99)
"""Which percentiles of a latency are reported."""


@dataclass(frozen=True)
class Drafts:
    """What came of drafts in a part of an engine's life.

    Attributes:
        steps: Verifications, of one sequence each.
        drafted: Drafts by position; ``drafted[0]`` counts first drafts.
        accepted: Accepted ones likewise.
    """

    steps: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, acceptance: Acceptance) -> Drafts:
        """What an engine counted so far; later counts do not change it."""
        return cls(acceptance.steps, tuple(acceptance.drafted), tuple(acceptance.accepted))

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(
            self.steps + other.steps,
            tuple(a + b for a, b in zip_longest(self.drafted, other.drafted, fillvalue=0)),
            tuple(a + b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)),
        )

    def __sub__(self, other: Drafts) -> Drafts:
        return Drafts(
            self.steps - other.steps,
            tuple(a - b for a, b in zip_longest(self.drafted, other.drafted, fillvalue=0)),
            tuple(a - b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)),
        )

    @property
    def length(self) -> float | None:
        """Tokens that a verification yields on average, the one without a draft included; None without any."""
        return 1 + sum(self.accepted) / self.steps if self.steps else None

    @property
    def rates(self) -> list[float | None]:
        """Share of the drafts that were accepted, by position; None where there were none."""
        return [a / d if d else None for a, d in zip(self.accepted, self.drafted, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "length": self.length,
            "rates": self.rates,
            "steps": self.steps,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
        }


@dataclass(frozen=True)
class StepYield:
    """Tokens that decoding steps yielded to their sequences.

    Attributes:
        tokens: Tokens, but for the first of each sequence, which its prompt's step yields.
        steps: Steps of one sequence each.
    """

    tokens: int = 0
    steps: int = 0

    def __add__(self, other: StepYield) -> StepYield:
        return StepYield(self.tokens + other.tokens, self.steps + other.steps)

    @property
    def mean(self) -> float | None:
        """Tokens of a step on average; None without any."""
        return self.tokens / self.steps if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"mean": self.mean, "tokens": self.tokens, "steps": self.steps}


def step_yields(traces: Iterable[Trace]) -> dict[str, StepYield]:
    """What steps yielded, by category of the prompts.

    A step yields the drafts that were accepted and then one token that is none; but that is missing where the text
    ends with a draft.
    """
    found: dict[str, StepYield] = {}
    for trace in traces:
        drafted = trace.drafted[1:]
        steps = drafted.count(False) + bool(drafted and drafted[-1])
        category = trace.request.category
        found[category] = found.get(category, StepYield()) + StepYield(len(drafted), steps)
    return found


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, :data:`PERCENTILES` (interpolated linearly between the two nearest values), max; None without values."""
    array = np.fromiter(values, np.float64)
    if array.size == 0:
        return None
    found = dict(zip(PERCENTILES, np.percentile(array, PERCENTILES).tolist(), strict=True))
    return {
        "mean": float(array.mean()),
        **{f"p{p}": value for p, value in found.items()},
        "max": float(array.max()),
    }


def statistics(traces: Sequence[Trace]) -> dict[str, Any]:
    """Latencies and throughput of a run, by the definitions of docs/bench.md.

    Args:
        traces: At least one; each has at least one token.

    Returns:
        Plain data: times in seconds (``*_s``), rates per second (``*_per_s``). What needs a second token is ``None`` if
        no request has one.
    """
    first_sent = min(t.sent for t in traces)
    seconds = max(t.times[-1] for t in traces) - first_sent
    prompt_tokens = sum(len(t.request.tokens) for t in traces)
    output_tokens = sum(len(t.tokens) for t in traces)
    waits = [t.times[0] - t.sent for t in traces]
    each = [(t.times[-1] - t.times[0]) / (len(t.times) - 1) for t in traces if len(t.times) > 1]
    gaps = [b - a for t in traces for a, b in pairwise(t.times)]
    return {
        "requests": len(traces),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "ttft_s": spread(waits),
        "time_per_token_s": spread(each),
        "gap_s": spread(gaps),
        "output_tokens_per_s": _rate(output_tokens, seconds),
        "output_tokens_per_s_per_sequence": _median(_rate(1, s) for s in each),
        "prompt_tokens_per_s": _rate(prompt_tokens, seconds),
        "prompt_tokens_per_s_per_sequence": _median(
            _rate(len(t.request.tokens), w) for t, w in zip(traces, waits, strict=True)
        ),
        "requests_per_s": _rate(len(traces), seconds),
    }


def thread_seconds() -> tuple[float, float] | None:
    """Seconds that this process's threads have run, and that they were ready but other threads had the processors.

    Threads that have ended are not counted. None where the system does not tell (Linux does).
    """
    running = waiting = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                ran, waited, _ = (task / "schedstat").read_text().split()
                running, waiting = running + int(ran), waiting + int(waited)
    except (OSError, ValueError):
        return None
    return (running / 1e9, waiting / 1e9) if running else None


def processor_wait(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """Of the time in which threads had something to do, the share in which they waited for a processor.

    Args:
        before: What :func:`thread_seconds` said before a run.
        after: The same after it.
    """
    if before is None or after is None:
        return None
    running, waiting = (max(0.0, b - a) for a, b in zip(before, after, strict=True))
    return waiting / (running + waiting) if running + waiting else None


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the rounds; None where no round has it."""
    merged: dict[str, Any] = {}
    for name in rounds[0]:
        values = [r[name] for r in rounds if r[name] is not None]
        if values and isinstance(values[0], Mapping):
            merged[name] = medians(values)
        else:
            merged[name] = _median(values)
    return merged


def _rate(count: float, seconds: float) -> float | None:
    """Per second; None if it took no time that the clock could tell."""
    return count / seconds if seconds > 0 else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None
