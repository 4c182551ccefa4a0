# SPDX-License-Identifier: Apache-2.0
"""``acceptance``: each speculator's drafts are accepted as often as when it was recorded, at each position of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.checks import Judgement, Skip
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import token_sequences
from nemo_build.engines.check.statistics import proportion_fell
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "acceptance"
MEASURED = ("sequences", "tokens", "output", "drafts", "every")
NEEDS_BASELINE = True
HARDWARE = False


@dataclass(frozen=True)
class Settings(Base):
    """How acceptance is measured, and how far it may fall.

    Attributes:
        sequences: Texts that are gone on from.
        tokens: Tokens of each prompt.
        output: Tokens that are generated after each.
        drafts: Drafts of a step.
        every: Whether all speculators of the engine are measured, not only the one that it is checked with.
        fall: Fall of the acceptance length that counts, as a fraction; less is never a regression.
        alpha: How improbable a fall must be by chance to count.
        floor: Smallest acceptance length whatever was recorded.
    """

    sequences: int = 12
    tokens: int = 64
    output: int = 64
    drafts: int = 4
    every: bool = True
    fall: float = 0.03
    alpha: float = 0.001
    floor: float = 1.0


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Counts by speculator and position of a run, greedy."""
    from nemo_build.runtime.params import SamplingParams

    names = subject.speculators if settings.every else [subject.speculator]
    names = [n for n in names if n != "none"]
    if not names:
        raise Skip("it is checked without a speculator")
    found = {}
    for name in names:
        engine = subject.engine(speculate=name, draft_length=settings.drafts)
        before = engine.acceptance
        steps, drafted, accepted = before.steps, list(before.drafted), list(before.accepted)
        prompts = token_sequences(engine, settings.sequences, settings.tokens)
        engine.generate(prompts, SamplingParams(max_tokens=settings.output, temperature=0, ignore_eos=True))
        after = engine.acceptance
        pad = [0] * len(after.drafted)
        found[name] = {
            "steps": after.steps - steps,
            "drafted": [a - b for a, b in zip(after.drafted, drafted or pad, strict=True)],
            "accepted": [a - b for a, b in zip(after.accepted, accepted or pad, strict=True)],
        }
    return found


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """The acceptance length of each speculator."""
    return {f"{name} length": round(_length(counts), 4) for name, counts in found.items()}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """A fall must be large enough to matter, and too large for chance."""
    was = before or now
    figures: list[Figure] = []
    for name, counts in now.items():
        if name in was:
            figures += _speculator(name, counts, was[name], settings)
    figures += [
        Figure(f"{name} length", Status.REGRESS, "none", round(_length(was[name]), 4), "as recorded")
        for name in was
        if name not in now
    ]
    fell = sorted({f.name.split()[0] for f in figures if f.status is not Status.PASS})
    causes = []
    if fell:
        drafters = ", ".join(fell)
        causes.append(f"{drafters}: the drafter, or what it is fed (taps, hidden states), changed")
    lengths = ", ".join(
        f"{n} {_length(c):.3f} (recorded {_length(was[n]):.3f})" for n, c in now.items() if n in was
    )
    return Judgement(
        f"tokens a verification: {lengths}", figures, causes, {"now": dict(now), "before": dict(was)}
    )


def _speculator(
    name: str, now: Mapping[str, Any], was: Mapping[str, Any], settings: Settings
) -> list[Figure]:
    length, old = _length(now), _length(was)
    p = proportion_fell(*((sum(c["accepted"]), sum(c["drafted"])) for c in (was, now)))
    least = max(old * (1 - settings.fall), settings.floor)
    bad = (length < old * (1 - settings.fall) and p < settings.alpha) or length < settings.floor
    status = Status.REGRESS if bad else Status.PASS
    limit = f"at least {least:.3f}, unless chance explains it"
    figures = [Figure(f"{name} length", status, round(length, 4), round(old, 4), limit, f"p = {p:.2g}")]
    for i, (d, a) in enumerate(zip(now["drafted"], now["accepted"], strict=True)):
        if i < len(was["drafted"]) and was["drafted"][i]:
            rate, old_rate = a / d if d else 0.0, was["accepted"][i] / was["drafted"][i]
            p = proportion_fell((was["accepted"][i], was["drafted"][i]), (a, d))
            bad = rate < old_rate * (1 - 2 * settings.fall) and p < settings.alpha
            status = Status.REGRESS if bad else Status.PASS
            values = round(rate, 4), round(old_rate, 4)
            figures.append(Figure(f"{name} draft {i + 1}", status, *values, note=f"p = {p:.2g}"))
    return figures


def _length(counts: Mapping[str, Any]) -> float:
    return 1 + sum(counts["accepted"]) / counts["steps"] if counts["steps"] else 1.0
