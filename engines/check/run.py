# SPDX-License-Identifier: Apache-2.0
"""Measuring and judging: a suite's checks of an engine against what was recorded."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nemo_build
from nemo_build.engines.check.baseline import Baseline, expired
from nemo_build.engines.check.causes import Changes
from nemo_build.engines.check.checks import Judgement, Skip, check_kinds
from nemo_build.engines.check.subject import Subject, fingerprint, machine
from nemo_build.engines.check.suite import Planned, Suite
from nemo_build.engines.check.verdict import Figure, Result, Status, Verdict, Waiver, worst
from nemo_build.errors import UserError

Report = Callable[[str], None]
"""Told of the name of each check as it begins."""


@dataclass(frozen=True)
class Measured:
    """What was measured: by check, plain data and whether it depends on the machine; and why others were not."""

    data: dict[str, tuple[dict[str, Any], bool]]
    skipped: dict[str, str]


def measure(subject: Subject, suite: Suite, report: Report = lambda _: None) -> Measured:
    """Measure for a baseline.

    Raises:
        UserError: A check fails, so the engine is not one to be recorded.
    """
    data, skipped = {}, {}
    for planned in suite.checks:
        report(planned.name)
        kind = check_kinds()[planned.kind]
        try:
            data[planned.name] = kind.measure(subject, planned.settings), _is_hardware(planned)
        except Skip as reason:
            skipped[planned.name] = str(reason)
        judged = _judge(planned, data[planned.name][0], None) if planned.name in data else None
        if judged is not None and worst(f.status for f in judged.figures) is Status.REGRESS:
            raise UserError(
                f"{planned.name}: {judged.headline}",
                [f"{f.name} is {f.value}; {f.limit}" for f in judged.figures if f.status is Status.REGRESS],
                "An engine that fails by itself is not recorded.",
            )
    return Measured(data, skipped)


def check(subject: Subject, suite: Suite, baseline: Baseline, report: Report = lambda _: None) -> Verdict:
    """Check an engine.

    Args:
        subject: The engine.
        suite: What is checked.
        baseline: What was recorded.
        report: Told of each check.
    """
    changes = Changes.of(subject, baseline)
    waivers = baseline.waivers()
    results = []
    for planned in suite.checks:
        report(planned.name)
        start = time.perf_counter()
        result = _check(planned, subject, baseline, changes)
        results.append(replace(_waived(result, waivers), seconds=time.perf_counter() - start))
    results += [_expired(w) for w in waivers if expired(w)]
    return Verdict.of(results, suite.allow_skip, _facts(subject, suite, baseline, changes))


def _check(planned: Planned, subject: Subject, baseline: Baseline, changes: Changes) -> Result:
    """One check; whatever goes wrong is its own outcome."""
    kind = check_kinds()[planned.kind]
    try:
        before = baseline.recorded(planned.name, hardware=_is_hardware(planned))
        if before is None and kind.NEEDS_BASELINE:
            return Result(planned.name, planned.kind, Status.SKIPPED, _missing(planned, baseline))
        judged = _judge(planned, kind.measure(subject, planned.settings), before)
    except Skip as reason:
        return Result(planned.name, planned.kind, Status.SKIPPED, str(reason))
    except UserError as error:
        return Result(planned.name, planned.kind, Status.BROKEN, str(error))
    except Exception as error:  # a check that fails must not take the others with it
        details = {"traceback": traceback.format_exc()}
        headline = f"the check failed: {type(error).__name__}: {error}"
        return Result(planned.name, planned.kind, Status.BROKEN, headline, details=details)
    status = worst(f.status for f in judged.figures)
    causes = list(judged.causes)
    if status is Status.REGRESS:
        causes += [c for c in changes.likely(planned.kind) if c not in causes]
    return Result(planned.name, planned.kind, status, judged.headline, judged.figures, causes, judged.details)


def _judge(planned: Planned, now: dict[str, Any], before: dict[str, Any] | None) -> Judgement:
    found: Judgement = check_kinds()[planned.kind].judge(now, before, planned.settings)
    return found


def _is_hardware(planned: Planned) -> bool:
    return bool(getattr(check_kinds()[planned.kind], "UNLIKE_HARDWARE", False))


def _missing(planned: Planned, baseline: Baseline) -> str:
    path = baseline.path(hardware=_is_hardware(planned))
    others = sorted(p.name for p in baseline.directory.glob(f"{baseline.key.file}.on.*.yaml"))
    if _is_hardware(planned) and others:
        return f"nothing was recorded on a machine like this one ({path.name}); there is {', '.join(others)}"
    return f"nothing was recorded of it in {path}; record it with --record"


def _waived(result: Result, waivers: Sequence[Waiver]) -> Result:
    """A result whose regressions somebody has waived."""
    valid = {w.name: w for w in waivers if not expired(w)}
    used: dict[str, Waiver] = {}
    figures = []
    for figure in result.figures:
        name = next((n for n in (f"{result.check}.{figure.name}", result.check) if n in valid), None)
        if figure.status is Status.REGRESS and name is not None:
            used[name] = valid[name]
            figure = replace(
                figure, status=Status.PASS, note=f"{figure.note} waived: {valid[name].why}".strip()
            )
        figures.append(figure)
    if not used:
        return result
    status = worst(f.status for f in figures)
    return replace(result, status=status, figures=figures, waived=list(used.values()))


def _expired(waiver: Waiver) -> Result:
    figure = Figure(waiver.name, Status.REGRESS, waiver.expires, limit="waivers end on their day")
    headline = f"the waiver of {waiver.name} expired on {waiver.expires}: {waiver.why}"
    return Result(f"waiver {waiver.name}", "waiver", Status.REGRESS, headline, [figure])


def _facts(subject: Subject, suite: Suite, baseline: Baseline, changes: Changes) -> dict[str, Any]:
    return {
        "nemo_build": nemo_build.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "engine": subject.facts,
        "baseline": {
            "directory": str(baseline.directory),
            "engine": baseline.facts(),
            "history": baseline.history(hardware=False) + baseline.history(hardware=True),
        },
        "suite": str(suite.path),
        "machine": {**machine(), "fingerprint": fingerprint()},
        "changes": changes.to_json(),
    }


def open_baseline(directory: Path, subject: Subject) -> Baseline:
    """The baselines in a directory for an engine on this machine."""
    return Baseline(directory, subject.key, fingerprint())
