# SPDX-License-Identifier: Apache-2.0
"""``numerics``: the engine's logits are those that were recorded.

What is recorded of a position is the few most likely tokens with their log-probabilities and the mass of all others.
The divergence from that is a lower bound of the true one (the data-processing inequality), and close to it, as the
others have little mass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import log_softmax, logits_of, token_sequences
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "numerics"
NEEDS_BASELINE = True


@dataclass(frozen=True)
class Settings(Base):
    """How far logits may be off.

    Attributes:
        sequences: Texts.
        tokens: Tokens of each.
        every: Positions between those that are recorded.
        top: Most likely tokens that are recorded of a position.
        kl_mean: Largest mean divergence in nats.
        kl_p99: Largest 99th percentile of it.
        top1: Smallest share of positions with the same most likely token.
        max_error: Largest difference of a log-probability of a recorded token; ``None``: any.
    """

    sequences: int = 8
    tokens: int = 96
    every: int = 6
    top: int = 8
    kl_mean: float = 1e-3
    kl_p99: float = 1e-2
    top1: float = 0.98
    max_error: float | None = None


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """What each recorded position predicts."""
    engine = subject.engine()
    positions: list[dict[str, Any]] = []
    for i, tokens in enumerate(token_sequences(engine, settings.sequences, settings.tokens)):
        logs = log_softmax(logits_of(engine.session, tokens))  # type: ignore[arg-type]
        for place in range(settings.every - 1, len(tokens), settings.every):
            row = logs[place]
            best = np.argsort(-row, kind="stable")[: settings.top]
            positions.append(
                {
                    "at": f"{i}:{place}",
                    "tokens": best.tolist(),
                    "logprobs": [round(float(v), 6) for v in row[best]],
                }
            )
    return {"positions": positions}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Divergence at each position that both have."""
    recorded = {p["at"]: p for p in (before or now)["positions"]}
    pairs = [(recorded[p["at"]], p) for p in now["positions"] if p["at"] in recorded]
    if len(pairs) < len(recorded):
        figure = Figure("positions", Status.BROKEN, len(pairs), len(recorded), "all that were recorded")
        return Judgement("the texts have other lengths than when it was recorded", [figure])
    divergence = np.array([_divergence(was, is_) for was, is_ in pairs])
    error = max(_error(was, is_) for was, is_ in pairs)
    agree = float(np.mean([was["tokens"][0] == is_["tokens"][0] for was, is_ in pairs]))
    mean, p99 = float(divergence.mean()), float(np.quantile(divergence, 0.99))
    worst = pairs[int(divergence.argmax())][0]["at"]
    figures = [
        _at_most("kl_mean", mean, settings.kl_mean),
        _at_most("kl_p99", p99, settings.kl_p99, f"largest at {worst} (text:position)"),
        Figure(
            "top1",
            Status.PASS if agree >= settings.top1 else Status.REGRESS,
            agree,
            limit=f"at least {settings.top1:g}",
        ),
        _at_most("max_error", error, np.inf if settings.max_error is None else settings.max_error),
    ]
    details = {"divergence": [float(d) for d in divergence], "at": [was["at"] for was, _ in pairs]}
    headline = (
        f"mean divergence {mean:.2e} nats over {len(pairs)} positions, same first choice at {agree:.1%}"
    )
    return Judgement(headline, figures, details=details)


def _at_most(name: str, value: float, limit: float, note: str = "") -> Figure:
    status = Status.PASS if value <= limit else Status.REGRESS  # what is not a number is no pass
    return Figure(name, status, value, limit=f"at most {limit:g}", note=note)


def _divergence(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """KL(was ‖ now) over the tokens that both name and one class of all others."""
    mine, theirs = (dict(zip(p["tokens"], p["logprobs"], strict=True)) for p in (was, now))
    shared = [t for t in mine if t in theirs]
    p, q = (np.exp(np.array([side[t] for t in shared])) for side in (mine, theirs))
    p, q = (np.append(side, max(1 - side.sum(), 1e-12)) for side in (p, q))
    return max(float((p * np.log(p / q)).sum()), 0.0) if np.isfinite([p, q]).all() else np.inf


def _error(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Largest difference of log-probabilities that both have."""
    theirs = dict(zip(now["tokens"], now["logprobs"], strict=True))
    found = [abs(v - theirs[t]) for t, v in zip(was["tokens"], was["logprobs"], strict=True) if t in theirs]
    return max(found, default=np.inf)
