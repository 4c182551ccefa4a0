# SPDX-License-Identifier: Apache-2.0
"""``tasks``: how well the engine does tasks of EleutherAI's lm-eval (the extra ``lm-eval``).

Results are kept sample by sample, so that those of two engines are compared in pairs: a task regresses if more samples
got wrong than right by more than chance explains (McNemar's exact test), and by more than the tolerance.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.checks import Judgement, Skip
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.statistics import sign_test, wilson_interval
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status
from nemo_build.errors import UserError

NAME = "tasks"
MEASURED = ("tasks", "metric", "limit", "shots")
NEEDS_BASELINE = True
HARDWARE = False


@dataclass(frozen=True)
class Settings(Base):
    """Which tasks are done, and how much worse is too much.

    Attributes:
        tasks: Names of lm-eval's tasks, or paths of YAML files that define one.
        metric: Which of a task's metrics; it must be 0 or 1 of each sample.
        limit: Samples of each task, from its beginning.
        shots: Worked examples before each sample.
        worse: Fall of the accuracy that counts; less is never a regression.
        alpha: How improbable it must be by chance.
        confidence: Of the accuracy's interval that is shown.
    """

    tasks: tuple[str, ...] = ()
    metric: str = "acc"
    limit: int = 200
    shots: int = 0
    worse: float = 0.01
    alpha: float = 0.01
    confidence: float = 0.95


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Of each task: a 0 or 1 for each sample, as one text."""
    if not settings.tasks:
        raise UserError(
            "The check `tasks` has no tasks.", hint="Name some in the suite: tasks: {tasks: [arc_easy]}."
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise Skip("lm-eval is not installed: pip install 'nemo-build[lm-eval]'")
    from nemo_build.engines.check.harness import run_tasks

    return run_tasks(subject.engine(), settings.tasks, settings.metric, settings.limit, settings.shots)


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Accuracies."""
    return {name: round(_accuracy(samples), 5) for name, samples in found.items()}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare sample by sample."""
    was = before or now
    figures = [_figure(name, samples, was.get(name, ""), settings) for name, samples in now.items()]
    figures += [
        Figure(name, Status.BROKEN, "not done", limit="as recorded") for name in was if name not in now
    ]
    bad = [f.name for f in figures if f.status is not Status.PASS]
    told = ", ".join(f"{f.name} {f.value}" for f in figures)
    return Judgement(f"worse at {', '.join(bad)}" if bad else told, figures)


def _figure(name: str, now: str, was: str, settings: Settings) -> Figure:
    if len(now) != len(was) or not now:
        return Figure(name, Status.BROKEN, f"{len(now)} samples", f"{len(was)} samples", "as recorded")
    worse = sum(a == "1" and b == "0" for a, b in zip(was, now, strict=True))
    better = sum(a == "0" and b == "1" for a, b in zip(was, now, strict=True))
    p = sign_test(worse, better)
    fell = (worse - better) / len(now) > settings.worse and p < settings.alpha
    low, high = wilson_interval(now.count("1"), len(now), confidence=settings.confidence)
    return Figure(
        name,
        Status.REGRESS if fell else Status.PASS,
        round(_accuracy(now), 4),
        round(_accuracy(was), 4),
        f"at most {settings.worse:g} lower, unless chance explains it",
        f"between {low:.3f} and {high:.3f}; {worse} samples got wrong, {better} right, p = {p:.2g}",
    )


def _accuracy(samples: str) -> float:
    return samples.count("1") / len(samples)
