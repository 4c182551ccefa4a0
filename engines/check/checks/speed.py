# SPDX-License-Identifier: Apache-2.0
"""``speed``: first token, time between tokens and tokens a second are those that were recorded on such a machine.

Where the engine that is compared with is at hand, both run by turns, in the same minutes on the same machine, and only
that counts; else what was recorded on a machine with the same fingerprint. A difference counts if it is beyond the
tolerance with all of its bootstrap interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import token_sequences
from nemo_build.engines.check.statistics import bootstrap_ratio
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine

NAME = "speed"
NEEDS_BASELINE = False
UNLIKE_HARDWARE = True


@dataclass(frozen=True)
class Settings(Base):
    """What is timed, and how much slower is too slow.

    Attributes:
        batches: Sequences at a time.
        tokens: Tokens of a prompt.
        output: Tokens that are generated of each.
        rounds: Times that everything is timed.
        slower: Fraction by which a figure may be worse.
        confidence: Of the interval that must lie beyond that.
    """

    batches: tuple[int, ...] = (1, 4)
    tokens: int = 64
    output: int = 64
    rounds: int = 7
    slower: float = 0.05
    confidence: float = 0.99


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Seconds by figure and round: of the engine, and of the other one if it is at hand."""
    from nemo_build.runtime.engine import Engine

    start = time.perf_counter()
    engine = subject.speculating()
    sides = {"now": engine}
    found: dict[str, dict[str, list[float]]] = {"now": {"load s": [time.perf_counter() - start]}}
    if subject.before is not None:
        sides["before"] = Engine.load(Path(subject.before), speculate=subject.speculator)
        found["before"] = {}
    timers: dict[str, Callable[[], dict[str, float]]] = {}
    for side, opened in sides.items():
        timers[side] = _timer(opened, settings)
        timers[side]()  # the first time is another matter: memory is touched, threads start
    for turn in range(settings.rounds):
        for side in sorted(timers, reverse=bool(turn % 2)):
            for name, seconds in timers[side]().items():
                found[side].setdefault(name, []).append(round(seconds, 6))
    return dict(found)


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare medians with their intervals."""
    was = now.get("before") or (before or {}).get("now")
    figures = []
    for name, values in now["now"].items():
        if name.startswith("load") or was is None or name not in was:
            continue
        ratio, low, high = bootstrap_ratio(was[name], values, confidence=settings.confidence)
        slower = low > 1 + settings.slower
        figures.append(
            Figure(
                name,
                Status.REGRESS if slower else Status.PASS,
                _median(values),
                _median(was[name]),
                f"at most {settings.slower:.0%} slower",
                f"{ratio:.3f} of the time, between {low:.3f} and {high:.3f}",
            )
        )
    if not figures:
        figures = [
            Figure(name, Status.SKIPPED, _median(values), note="nothing to compare it with on this machine")
            for name, values in now["now"].items()
        ]
    slow = [f.name for f in figures if f.status is Status.REGRESS]
    beside = "the engine beside it" if now.get("before") else "what was recorded"
    headline = f"slower than {beside}: {', '.join(slow)}" if slow else f"compared with {beside}"
    details = {"now": dict(now["now"]), "before": dict(was or {})}
    return Judgement(headline, figures, details=details)


def _timer(engine: Engine, settings: Settings) -> Callable[[], dict[str, float]]:
    """What times one round: seconds to the first token, and for a token, by batch."""
    from nemo_build.runtime.params import SamplingParams

    prompts = token_sequences(engine, max(settings.batches), settings.tokens)
    params = SamplingParams(max_tokens=settings.output, temperature=0, ignore_eos=True)

    def run() -> dict[str, float]:
        found = {}
        for batch in settings.batches:
            start = time.perf_counter()
            first: dict[int, float] = {}
            count = 0
            for chunk in engine.stream(_cycle(prompts, batch), params):
                first.setdefault(chunk.index, time.perf_counter() - start)
                count += chunk.token_id is not None
            total = time.perf_counter() - start
            found[f"first token s at {batch}"] = sum(first.values()) / len(first)
            found[f"s a token at {batch}"] = total / count
        return found

    return run


def _cycle(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    return [prompts[i % len(prompts)] for i in range(count)]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
