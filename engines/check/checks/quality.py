# SPDX-License-Identifier: Apache-2.0
"""``quality``: how well the engine predicts texts, document by document.

Perplexities of two engines on the same documents are compared in pairs: the interval of the mean difference of losses
is narrow although documents differ much. It must lie beyond the tolerance as a whole to be a regression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import logits_of, token_sequences
from nemo_build.engines.check.statistics import paired_interval
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status
from nemo_build.export.quantize.evaluation import log_softmax

NAME = "quality"
MEASURED = ("documents", "tokens")
NEEDS_BASELINE = True
HARDWARE = False


@dataclass(frozen=True)
class Settings(Base):
    """What is predicted, and how much worse is too much.

    Attributes:
        documents: Texts.
        tokens: Tokens of each.
        worse: Rise of the mean loss in nats a token that counts; less is never a regression.
        confidence: Of the interval that must lie beyond that.
    """

    documents: int = 20
    tokens: int = 192
    worse: float = 0.01
    confidence: float = 0.99


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Mean loss of each document, in nats a token."""
    engine = subject.engine()
    losses = []
    for tokens in token_sequences(engine, settings.documents, settings.tokens):
        logs = log_softmax(logits_of(engine.session, tokens)[:-1])  # type: ignore[arg-type]
        losses.append(round(float(-logs[np.arange(len(tokens) - 1), tokens[1:]].mean()), 6))
    return {"losses": losses}


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """The perplexity over all documents, each with the same weight."""
    return {"perplexity": _perplexity(found)}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare in pairs."""
    was = before or now
    if len(was["losses"]) != len(now["losses"]):
        figure = Figure("documents", Status.BROKEN, len(now["losses"]), len(was["losses"]), "as recorded")
        return Judgement("other documents than when it was recorded", [figure])
    pairs = zip(now["losses"], was["losses"], strict=True)
    mean, low, high = paired_interval([float(a) - float(b) for a, b in pairs], confidence=settings.confidence)
    good = low <= settings.worse  # what is not a number is no pass
    figure = Figure(
        "perplexity",
        Status.PASS if good else Status.REGRESS,
        _perplexity(now),
        _perplexity(was),
        f"loss at most {settings.worse:g} nats a token higher",
        f"{mean:+.4f} nats a token, between {low:+.4f} and {high:+.4f}",
    )
    details = {"now": list(now["losses"]), "before": list(was["losses"])}
    headline = f"perplexity {figure.value:.4g}, recorded was {figure.baseline:.4g}"
    return Judgement(headline, [figure], details=details)


def _perplexity(found: Mapping[str, Any]) -> float:
    return round(math.exp(float(np.mean([float(v) for v in found["losses"]]))), 5)
