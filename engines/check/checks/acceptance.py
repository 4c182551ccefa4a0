# SPDX-License-Identifier: Apache-2.0
"""``acceptance``: each speculator's drafts are accepted as often as when it was recorded, and at the same tokens.

Rates say what drafts are worth, and need many drafts to say it. Which tokens of a greedy text were accepted drafts is
far more telling: it is the same each time, and a drafter that is fed something else, but about as good, has it changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_FEATURES = {"taps": "taps", "hidden": "hidden states"}
"""Words for what the target gives drafters."""

_DRAFTED = "*"
"""Behind a token that was an accepted draft."""


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
        same: Smallest share of tokens that are accepted drafts, or are none, as recorded; over texts up to where the
            target's tokens are others.
        floor: Smallest acceptance length whatever was recorded.
    """

    sequences: int = 12
    tokens: int = 64
    output: int = 64
    drafts: int = 4
    every: bool = True
    fall: float = 0.03
    alpha: float = 0.001
    same: float = 0.95
    floor: float = 1.0


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Counts by speculator and position of a run, and texts with their accepted drafts marked; greedy."""
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
        params = SamplingParams(max_tokens=settings.output, temperature=0, ignore_eos=True)
        texts: list[list[str]] = [[] for _ in prompts]
        for chunk in engine.stream(prompts, params):
            if chunk.token_id is not None:
                texts[chunk.index].append(f"{chunk.token_id}{_DRAFTED if chunk.drafted else ''}")
        after = engine.acceptance
        pad = [0] * len(after.drafted)
        found[name] = {
            "steps": after.steps - steps,
            "drafted": [a - b for a, b in zip(after.drafted, drafted or pad, strict=True)],
            "accepted": [a - b for a, b in zip(after.accepted, accepted or pad, strict=True)],
            "texts": [" ".join(text) for text in texts],
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
    fell = {f.name.split()[0] for f in figures if f.status is Status.REGRESS}
    causes = _causes(fell, now)
    lengths = ", ".join(
        f"{n} {_length(c):.3f} (recorded {_length(was[n]):.3f})" for n, c in now.items() if n in was
    )
    details = {"now": dict(now), "before": dict(was)}
    return Judgement(f"tokens a verification: {lengths}", figures, causes, details)


def _causes(fell: set[str], measured: Mapping[str, Any]) -> list[str]:
    """Whether it is each drafter, or what several of them are fed."""
    from nemo_build.runtime.speculation.kinds import SPECULATORS

    causes = []
    for features in sorted({SPECULATORS[n].features or "" for n in fell}):
        alike = {n for n in measured if (SPECULATORS[n].features or "") == features}
        changed = sorted(alike & fell)
        names = ", ".join(changed)
        if not features:
            causes.append(f"{names}: the texts that it drafts from changed, or how it does")
        elif len(changed) > 1 and set(changed) == alike:
            causes.append(f"{names}: the {_FEATURES[features]} that all of them are fed changed")
        else:
            causes.append(f"{names}: the drafter, or the {_FEATURES[features]} that it is fed, changed")
    return causes


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
    return [*figures, _places(name, now["texts"], was.get("texts"), settings)]


def _places(name: str, now: Sequence[str], was: Sequence[str] | None, settings: Settings) -> Figure:
    """Whether the same tokens of the same texts were accepted drafts."""
    name, limit = f"{name} same tokens", f"at least {settings.same:g}"
    if was is None:
        return Figure(
            name, Status.SKIPPED, "not recorded", limit=limit, note="--update --why REASON records it"
        )
    pairs = [pair for a, b in zip(was, now, strict=True) for pair in _same_beginning(a.split(), b.split())]
    tokens = sum(len(text.split()) for text in was)
    share = sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0
    status = Status.PASS if share >= settings.same else Status.REGRESS
    return Figure(name, status, round(share, 4), limit=limit, note=f"of {len(pairs)} tokens of {tokens}")


def _same_beginning(was: Sequence[str], now: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of marked tokens up to where the tokens are others."""
    pairs = list(zip(was, now, strict=False))
    ends = (i for i, (a, b) in enumerate(pairs) if a.rstrip(_DRAFTED) != b.rstrip(_DRAFTED))
    return pairs[: next(ends, len(pairs))]


def _length(counts: Mapping[str, Any]) -> float:
    return 1 + sum(counts["accepted"]) / counts["steps"] if counts["steps"] else 1.0
