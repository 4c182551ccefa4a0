# SPDX-License-Identifier: Apache-2.0
"""``acceptance``: drafts are accepted as often as when it was recorded, at each position of a run."""

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
NEEDS_BASELINE = True


@dataclass(frozen=True)
class Settings(Base):
    """How acceptance is measured, and how far it may fall.

    Attributes:
        sequences: Texts that are gone on from.
        tokens: Tokens of each prompt.
        output: Tokens that are generated after each.
        drafts: Drafts of a step.
        fall: Fall of the acceptance length that counts, as a fraction; less is never a regression.
        alpha: How improbable a fall must be by chance to count.
        floor: Smallest acceptance length whatever was recorded.
    """

    sequences: int = 12
    tokens: int = 64
    output: int = 64
    drafts: int = 4
    fall: float = 0.03
    alpha: float = 0.001
    floor: float = 1.0


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Counts by position of a run, greedy."""
    from nemo_build.runtime.params import SamplingParams

    if subject.speculator == "none":
        raise Skip("it is checked without a speculator")
    engine = subject.speculating(draft_length=settings.drafts)
    before = engine.acceptance
    steps, drafted, accepted = before.steps, list(before.drafted), list(before.accepted)
    prompts = token_sequences(engine, settings.sequences, settings.tokens)
    engine.generate(prompts, SamplingParams(max_tokens=settings.output, temperature=0, ignore_eos=True))
    after = engine.acceptance
    pad = [0] * len(after.drafted)
    return {
        "steps": after.steps - steps,
        "drafted": [a - b for a, b in zip(after.drafted, drafted or pad, strict=True)],
        "accepted": [a - b for a, b in zip(after.accepted, accepted or pad, strict=True)],
    }


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """A fall must be large enough to matter, and too large for chance."""
    was = before or now
    length, old = _length(now), _length(was)
    trials = [(sum(d["accepted"]), sum(d["drafted"])) for d in (was, now)]
    p = proportion_fell(*trials)
    fell = length < old * (1 - settings.fall) and p < settings.alpha
    low = length < settings.floor
    figures = [
        Figure(
            "length",
            Status.REGRESS if fell or low else Status.PASS,
            round(length, 4),
            round(old, 4),
            f"at least {max(old * (1 - settings.fall), settings.floor):.3f}, unless chance explains it",
            f"p = {p:.2g} that it did not fall",
        )
    ]
    for i, (d, a) in enumerate(zip(now["drafted"], now["accepted"], strict=True)):
        if i < len(was["drafted"]) and was["drafted"][i]:
            rate, old_rate = a / d if d else 0.0, was["accepted"][i] / was["drafted"][i]
            chance = proportion_fell((was["accepted"][i], was["drafted"][i]), (a, d))
            bad = rate < old_rate * (1 - 2 * settings.fall) and chance < settings.alpha
            status = Status.REGRESS if bad else Status.PASS
            figures.append(
                Figure(f"draft {i + 1}", status, round(rate, 4), round(old_rate, 4), note=f"p = {chance:.2g}")
            )
    details = {"now": dict(now), "before": dict(was)}
    causes = ["the drafter, or what it is fed (taps, hidden states), changed"] if fell else []
    return Judgement(f"{length:.3f} tokens a verification, recorded were {old:.3f}", figures, causes, details)


def _length(counts: Mapping[str, Any]) -> float:
    return 1 + sum(counts["accepted"]) / counts["steps"] if counts["steps"] else 1.0
