# SPDX-License-Identifier: Apache-2.0
"""``speed``: first token, time between tokens, tokens a second, and what loading and building take.

Where the engine that is compared with is at hand, both run by turns on the same machine, and only that counts; else
what was recorded on a machine with the same facts. Figures of unlike machines are never compared. A difference counts
if it is beyond the tolerance with all of its bootstrap interval.

Some two dozen figures are judged, and what a machine does besides, or where memory of one engine came to lie, is in all
values of one that are taken within a second. So what seems slower than the engine beside it is timed again, with
engines loaded anew and more values, and only what is slower again counts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.statistics import ratio_interval
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.timing import Case, Effort, Timed, add, load, time_case, time_opening
from nemo_build.engines.check.verdict import Figure, Status

NAME = "speed"
MEASURED = ("batches", "contexts", "drafts")
NEEDS_BASELINE = True
HARDWARE = True

_HIGHER = ("tokens/s",)
"""Beginnings of the names of figures of which more is better; of all others, less is."""

_AGAIN = 2
"""How many times as many values are taken of what is timed again."""

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
        patience: Seconds after which no more rounds than `rounds` are begun; of what is timed again, as many anew.
        first_tokens: Values for the time to the first token; an interval at 99 % needs eight or more.
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
    first_tokens: int = 16
    loads: int = 3
    drafts: int = 4
    slower: float = 0.04
    slower_recorded: float = 0.25
    slower_seldom: float = 1.0
    confidence: float = 0.99


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Seconds, or tokens a second, by figure and round: of the engine, and of the other one if it is at hand.

    Returns:
        ``now`` and, beside another engine, ``before``; ``again`` has both of what seemed slower, timed again.
    """
    subject.engine()  # raises Skip if it cannot run here
    paths = {"now": subject.path} | ({"before": subject.before} if subject.before is not None else {})
    found: dict[str, Any] = {**_timed(paths, subject, settings, None)}
    if subject.reference is not None:
        for _ in range(settings.loads):
            add(found, "now", "build s", _build_seconds(subject, subject.reference))
    slow = _slow(found, settings)
    if slow:
        found["again"] = _timed(paths, subject, _with_more(settings), slow)
    return found


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Medians."""
    return {name: _median(values) for name, values in found["now"].items()}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare medians with their intervals."""
    beside = bool(now.get("before"))
    was = now["before"] if beside else (before or now)["now"]
    again = now.get("again", {})
    figures = [
        _figure(name, values, was[name], beside, settings)
        for name, values in now["now"].items()
        if name in was
    ]
    figures = [
        _confirmed(f, _figure(f.name, again["now"][f.name], again["before"][f.name], beside, settings))
        if f.status is Status.REGRESS and f.name in again.get("now", {})
        else f
        for f in figures
    ]
    slow = [f.name for f in figures if f.status is Status.REGRESS]
    against = "the engine beside it" if beside else "what was recorded on such a machine"
    headline = f"worse than {against}: {', '.join(slow)}" if slow else f"as fast as {against}"
    details = {"now": dict(now["now"]), "before": dict(was)} | ({"again": again} if again else {})
    return Judgement(headline, figures, details=details)


def _with_more(settings: Settings) -> Settings:
    """The same with more values of everything."""
    return replace(
        settings,
        rounds=_AGAIN * settings.rounds,
        most_rounds=_AGAIN * settings.most_rounds,
        first_tokens=_AGAIN * settings.first_tokens,
        loads=_AGAIN * settings.loads,
    )


def _confirmed(first: Figure, second: Figure) -> Figure:
    """A figure that regressed, as it is after it was timed again."""
    note = f"{first.note}; timed again with engines loaded anew {second.note}"
    return replace(first, status=second.status, note=note)


def _slow(found: Mapping[str, Any], settings: Settings) -> set[str]:
    """Figures that are worse than those of the engine beside it."""
    if "before" not in found:
        return set()
    return {f.name for f in judge(found, None, settings).figures if f.status is Status.REGRESS}


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


def _timed(paths: Mapping[str, Path], subject: Subject, settings: Settings, only: set[str] | None) -> Timed:
    """Everything, or the cases that have some figures."""
    found: Timed = {}
    if only is None or "load s" in only:
        time_opening(paths, {"speculate": subject.speculator}, settings.loads, found)
    effort = Effort(settings.first_tokens, settings.steps, settings.rounds, settings.most_rounds)
    deadline = time.monotonic() + settings.patience
    for mode, options in _modes(subject, settings).items():
        cases = [Case(mode, options, b, c) for b in settings.batches for c in settings.contexts]
        cases = [c for c in cases if only is None or c.figures & only]
        engines = {side: load(path, options) for side, path in paths.items()} if cases else {}
        for case in (c for c in cases if c.fits(engines)):

            def more(name: str = case.figure("between tokens s")) -> bool:
                return time.monotonic() < deadline and _undecided(found, name, settings)

            time_case(engines, case, effort, more, found)
    return found


def _modes(subject: Subject, settings: Settings) -> dict[str, dict[str, Any]]:
    """Options of ``Engine.load``, by the words for them in names of figures."""
    modes: dict[str, dict[str, Any]] = {"": {}}
    if subject.speculator != "none":
        options = {"speculate": subject.speculator, "draft_length": settings.drafts}
        modes[f" with {subject.speculator}"] = options
    return modes


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


def _undecided(found: Mapping[str, Mapping[str, Sequence[float]]], name: str, settings: Settings) -> bool:
    """Whether more rounds may tell if the engine is slower than the one beside it."""
    if "before" not in found:
        return False
    was, now = found["before"][name], found["now"][name]
    _, low, high = ratio_interval(was, now, confidence=settings.confidence, paired=True)
    return low <= 1 + settings.slower < high


def _median(values: Sequence[float]) -> float:
    return float(f"{np.median(values):.6g}")
