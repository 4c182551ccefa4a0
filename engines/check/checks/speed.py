# SPDX-License-Identifier: Apache-2.0
"""``speed``: first token, time between tokens, tokens a second, and what loading and building take.

Where the engine that is compared with is at hand, both run by turns, step by step on the same machine, and only that
counts; else what was recorded on a machine with the same facts. Figures of unlike machines are never compared. A
difference counts if it is beyond the tolerance with all of its bootstrap interval.

Of a round of steps the fastest one counts, and of the rounds the median: others at work on the machine
make single steps several times slower, and that says nothing of the engine.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import filled
from nemo_build.engines.check.statistics import ratio_interval
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine
    from nemo_build.runtime.request import Request

NAME = "speed"
MEASURED = ("batches", "contexts", "drafts")
NEEDS_BASELINE = True
HARDWARE = True

_HIGHER = ("tokens/s",)
"""Beginnings of the names of figures of which more is better; of all others, less is."""

_LONGEST = 192
"""Tokens after which requests begin anew, so that their context stays about what it is called."""

_ROOM = 32
"""Positions that a prompt must leave."""

_SELDOM = ("load s", "build s")
"""Beginnings of the names of figures that are measured a few times only, and depend on disk and page cache."""


@dataclass(frozen=True)
class Settings(Base):
    """What is timed, and how much slower is too slow.

    Attributes:
        batches: Sequences at a time.
        contexts: Tokens of a prompt.
        steps: Steps of a round.
        rounds: Times that everything is timed.
        most_rounds: The same, where the interval beside another engine holds the tolerance, so that nothing is decided.
        patience: Seconds after which no more rounds than `rounds` are begun.
        first_tokens: Times that prompts are computed; an interval at 99 % needs eight values or more.
        loads: Times that the engine is loaded, and, with a model bundle as the reference, built.
        drafts: Drafts of a step, with a speculator.
        slower: Fraction by which a figure may be worse, compared with an engine beside it.
        slower_recorded: The same, compared with what was recorded: the machine itself is not always as fast.
        slower_seldom: The same of loading and building.
        confidence: Of the interval that must lie beyond that.
    """

    batches: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (32, 256)
    steps: int = 10
    rounds: int = 20
    most_rounds: int = 100
    patience: float = 25.0
    first_tokens: int = 9
    loads: int = 3
    drafts: int = 4
    slower: float = 0.04
    slower_recorded: float = 0.25
    slower_seldom: float = 1.0
    confidence: float = 0.99


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Seconds, or tokens a second, by figure and round: of the engine, and of the other one if it is at hand."""
    subject.engine()  # raises Skip if it cannot run here
    paths = {"now": subject.path} | ({"before": subject.before} if subject.before is not None else {})
    found: dict[str, dict[str, list[float]]] = {side: {} for side in paths}
    _time_opening(paths, subject, settings, found)
    deadline = time.monotonic() + settings.patience
    modes = {
        "": {},
        f" with {subject.speculator}": {"speculate": subject.speculator, "draft_length": settings.drafts},
    }
    if subject.speculator == "none":
        modes.popitem()
    for mode, options in modes.items():
        engines = {side: _load(path, options) for side, path in paths.items()}
        limit = min(e.session.context for e in engines.values()) - _ROOM
        slots = min(e.session.slots for e in engines.values())
        for batch in (b for b in settings.batches if b <= slots):
            for context in (c for c in settings.contexts if c <= limit):
                _time_case(engines, mode, batch, context, settings, found, deadline)
    return dict(found)


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Medians."""
    return {name: _median(values) for name, values in found["now"].items()}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare medians with their intervals."""
    beside = bool(now.get("before"))
    was = now["before"] if beside else (before or now)["now"]
    figures = [
        _figure(name, values, was[name], beside, settings)
        for name, values in now["now"].items()
        if name in was
    ]
    slow = [f.name for f in figures if f.status is Status.REGRESS]
    against = "the engine beside it" if beside else "what was recorded on such a machine"
    headline = f"worse than {against}: {', '.join(slow)}" if slow else f"as fast as {against}"
    details = {"now": dict(now["now"]), "before": dict(was)}
    return Judgement(headline, figures, details=details)


def _figure(
    name: str, values: Sequence[float], was: Sequence[float], beside: bool, settings: Settings
) -> Figure:
    higher, seldom = name.startswith(_HIGHER), name.startswith(_SELDOM)
    allowed = settings.slower if beside else settings.slower_recorded
    allowed = max(allowed, settings.slower_seldom) if seldom else allowed
    times = [(1 / np.asarray(v)).tolist() if higher else list(v) for v in (was, values)]
    paired = beside and len(was) == len(values)
    ratio, low, high = ratio_interval(*times, confidence=settings.confidence, paired=paired)
    status = Status.REGRESS if low > 1 + allowed else Status.PASS
    note = f"{ratio:.3f} of the time, between {low:.3f} and {high:.3f}"
    return Figure(name, status, _median(values), _median(was), f"at most {allowed:.0%} worse", note)


def _time_opening(
    paths: Mapping[str, Path], subject: Subject, settings: Settings, found: dict[str, dict[str, list[float]]]
) -> None:
    for turn in range(settings.loads):
        for side in _turn(paths, turn):
            start = time.perf_counter()
            _load(paths[side], {"speculate": subject.speculator})
            found[side].setdefault("load s", []).append(time.perf_counter() - start)
    if subject.reference is not None:
        for _ in range(settings.loads):
            found["now"].setdefault("build s", []).append(_build_seconds(subject, subject.reference))


def _build_seconds(subject: Subject, reference: Path) -> float:
    from nemo_build.engines.build import BuildOptions, build_engine

    with tempfile.TemporaryDirectory(prefix="nemo-build-") as folder:
        start = time.perf_counter()
        known = {f.name for f in fields(BuildOptions)}
        made = {name: value for name, value in subject.manifest["options"].items() if name in known}
        options = BuildOptions(**made, backend=subject.manifest["backend"]["name"])
        target = str(subject.manifest["target"])
        build_engine(reference, Path(folder) / "engine", target=target, options=options, use_cache=False)
        return time.perf_counter() - start


def _load(path: Path, options: Mapping[str, Any]) -> Engine:
    from nemo_build.runtime.engine import Engine

    return Engine.load(path, **options)


def _time_case(
    engines: Mapping[str, Engine],
    mode: str,
    batch: int,
    context: int,
    settings: Settings,
    found: dict[str, dict[str, list[float]]],
    deadline: float,
) -> None:
    """Time one mode at one size: first tokens, then rounds of a few steps, both sides by turns, step by step."""
    where = f"{mode} at {batch}x{context}"
    for turn in range(-1, settings.first_tokens):  # the first time memory is touched, and threads start
        for side in _turn(engines, turn):
            first = _first_token(engines[side], batch, context)
            if turn >= 0:
                found[side].setdefault(f"first token s{where}", []).append(first)
    steppers = {side: _Stepper(e, batch, context) for side, e in engines.items()}
    gc.collect()
    for turn in range(settings.most_rounds):
        is_end = turn > 0 and turn % settings.rounds == 0
        if is_end and not (
            time.monotonic() < deadline and _undecided(found, f"between tokens s{where}", settings)
        ):
            break
        _time_round(steppers, turn, where, batch, settings, found)
    for stepper in steppers.values():
        stepper.close()


def _time_round(
    steppers: Mapping[str, _Stepper],
    turn: int,
    where: str,
    batch: int,
    settings: Settings,
    found: dict[str, dict[str, list[float]]],
) -> None:
    """A few steps of each side by turns, of which the fastest counts."""
    seconds: dict[str, list[float]] = {side: [] for side in steppers}
    tokens = dict.fromkeys(steppers, 0)
    for i in range(settings.steps):
        for side in _turn(steppers, turn + i):
            elapsed, count = steppers[side].step()
            seconds[side].append(elapsed)
            tokens[side] += count
    for side in steppers:
        step, each = min(seconds[side]), tokens[side] / settings.steps
        found[side].setdefault(f"between tokens s{where}", []).append(step * batch / each)
        found[side].setdefault(f"tokens/s{where}", []).append(each / step)


def _undecided(found: Mapping[str, Mapping[str, Sequence[float]]], name: str, settings: Settings) -> bool:
    """Whether more rounds may tell if the engine is slower than the one beside it."""
    if "before" not in found:
        return False
    was, now = found["before"][name], found["now"][name]
    _, low, high = ratio_interval(was, now, confidence=settings.confidence, paired=True)
    return low <= 1 + settings.slower < high


class _Stepper:
    """Requests that are stepped; where one of them ends, all begin anew, which is not timed."""

    def __init__(self, engine: Engine, batch: int, context: int) -> None:
        from nemo_build.runtime.params import SamplingParams

        self._engine, self._prompts = engine, filled(engine, batch, context)
        most = min(_LONGEST, engine.session.context - context)
        self._params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
        self._requests: list[Request] = []

    def step(self) -> tuple[float, int]:
        """Seconds of a step, and tokens that came of it."""
        if not self._requests or any(r.finished for r in self._requests):
            self._begin()
        for request in self._requests:
            request.events.clear()
        start = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - start
        return seconds, sum(len(r.events) for r in self._requests)

    def close(self) -> None:
        """End the requests."""
        self._engine.cancel(self._requests)
        while self._engine.unfinished:
            self._engine.step()

    def _begin(self) -> None:
        self.close()
        self._requests = self._engine.requests(self._prompts, self._params)
        self._engine.add(self._requests)
        while not all(r.events for r in self._requests):
            self._engine.step()
        self._engine.step()


def _first_token(engine: Engine, batch: int, context: int) -> float:
    """Mean seconds to the first token."""
    from nemo_build.runtime.params import SamplingParams

    prompts = filled(engine, batch, context)
    start = time.perf_counter()
    first = [
        time.perf_counter() - start
        for chunk in engine.stream(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        if chunk.token_id is not None
    ]
    return sum(first) / len(first)


def _turn(sides: Mapping[str, Any], turn: int) -> list[str]:
    """The sides in an order that alternates."""
    return sorted(sides, reverse=bool(turn % 2))


def _median(values: Sequence[float]) -> float:
    return float(f"{np.median(values):.6g}")
