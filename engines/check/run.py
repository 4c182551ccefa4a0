# SPDX-License-Identifier: Apache-2.0
"""Measuring and judging: a suite's checks of an engine against what was recorded."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import nemo_build
from nemo_build.engines.check.baseline import Baseline, Measurement, Record, Waivers, expired
from nemo_build.engines.check.causes import NO_CHANGE, Changes
from nemo_build.engines.check.checks import Judgement, Settings, Skip, check_kinds
from nemo_build.engines.check.plain import plain
from nemo_build.engines.check.subject import Subject, machine
from nemo_build.engines.check.suite import Planned, Suite
from nemo_build.engines.check.verdict import Figure, Result, Status, Verdict, Waiver, worst
from nemo_build.errors import UserError

Report = Callable[[str], None]
"""Told of the name of each check as it begins."""


@dataclass(frozen=True)
class Measured:
    """What was measured for a baseline, by check; and why others were not."""

    data: dict[str, Measurement]
    skipped: dict[str, str]


def measure(subject: Subject, suite: Suite, report: Report = lambda _: None) -> Measured:
    """Measure for a baseline.

    Raises:
        UserError: A check fails, so the engine is not one to be recorded.
    """
    data: dict[str, Measurement] = {}
    skipped: dict[str, str] = {}
    for planned in suite.checks:
        report(planned.name)
        kind = check_kinds()[planned.kind]
        try:
            found = plain(kind.measure(subject, planned.settings))
        except Skip as reason:
            skipped[planned.name] = str(reason)
            continue
        judged: Judgement = kind.judge(found, None, planned.settings)
        bad = [f for f in judged.figures if f.status in (Status.REGRESS, Status.BROKEN)]
        if bad:
            raise UserError(
                f"{planned.name}: {judged.headline}",
                [f"{f.name} is {f.value}; {f.limit}" for f in bad],
                "An engine that fails by itself is not recorded.",
            )
        record = Record(_measured_with(kind, planned.settings), found)
        data[planned.name] = Measurement(record, kind.summary(found), kind.HARDWARE)
    return Measured(data, skipped)


def unrecorded(suite: Suite, baseline: Baseline) -> Suite:
    """The checks of a suite of which nothing was recorded yet."""
    return replace(
        suite,
        checks=tuple(
            p
            for p in suite.checks
            if baseline.recorded(p.name, hardware=check_kinds()[p.kind].HARDWARE) is None
        ),
    )


def differences(measured: Measured, suite: Suite, baseline: Baseline) -> list[tuple[str, Any, Any]]:
    """Main figures that are not as they were recorded: name, recorded, measured."""
    found = []
    for planned in suite.checks:
        kind = check_kinds()[planned.kind]
        if planned.name not in measured.data:
            continue
        record = baseline.recorded(planned.name, hardware=kind.HARDWARE)
        old = {} if record is None else kind.summary(record.found)
        new = measured.data[planned.name].summary
        found += [
            (f"{planned.name}.{name}", old.get(name), new.get(name))
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    return found


def check(subject: Subject, suite: Suite, baseline: Baseline, report: Report = lambda _: None) -> Verdict:
    """Check an engine.

    Args:
        subject: The engine.
        suite: What is checked.
        baseline: What was recorded.
        report: Told of each check.
    """
    changes = recorded_changes(subject, suite, baseline)
    waivers = Waivers(baseline.directory).all()
    results = []
    for planned in suite.checks:
        report(planned.name)
        start = time.perf_counter()
        result = _check(planned, subject, baseline, changes)
        results.append(replace(_waived(result, waivers), seconds=round(time.perf_counter() - start, 3)))
    used = {w.name for r in results for w in r.waived}
    results += [_expired(w) for w in waivers if expired(w)]
    facts = _facts(subject, suite, baseline, changes)
    facts["unused_waivers"] = [w.name for w in waivers if w.name not in used and not expired(w)]
    return Verdict.of(results, suite.allow_skip, facts)


def recorded_changes(subject: Subject, suite: Suite, baseline: Baseline) -> Changes:
    """What is not as the suite's first check of structure recorded it."""
    names = [p.name for p in suite.checks if p.kind == "structure"] or ["structure"]
    record = baseline.recorded(names[0], hardware=False)
    return Changes.of(subject, None if record is None else record.found)


def _check(planned: Planned, subject: Subject, baseline: Baseline, changes: Changes) -> Result:
    """One check; whatever goes wrong is its own outcome."""
    kind = check_kinds()[planned.kind]
    name, settings = planned.name, planned.settings
    try:
        record = baseline.recorded(name, hardware=kind.HARDWARE)
        beside = planned.kind == "speed" and subject.before is not None
        if record is None and kind.NEEDS_BASELINE and not beside:
            return Result(name, planned.kind, Status.SKIPPED, _missing(planned, baseline))
        if record is not None and not beside:
            _require_same(planned, kind, record)
        now = plain(kind.measure(subject, settings))
        judged: Judgement = kind.judge(now, None if record is None else record.found, settings)
    except Skip as reason:
        return Result(name, planned.kind, Status.SKIPPED, str(reason))
    except (UserError, OSError) as error:
        return Result(name, planned.kind, Status.BROKEN, str(error))
    except Exception as error:  # a check that fails must not take the others with it
        details = {"traceback": traceback.format_exc()}
        headline = f"the check failed: {type(error).__name__}: {error}"
        return Result(name, planned.kind, Status.BROKEN, headline, details=details)
    status = worst(f.status for f in judged.figures)
    causes = list(judged.causes)
    if status in (Status.REGRESS, Status.BROKEN):
        causes += [c for c in changes.likely(planned.kind, judged.where) if c not in causes]
        if changes.known and not causes:
            causes.append(NO_CHANGE)
    return Result(name, planned.kind, status, judged.headline, judged.figures, causes, judged.details)


def _measured_with(kind: ModuleType, settings: Settings) -> dict[str, Any]:
    """The settings that what is measured depends on, as plain data."""
    found: dict[str, Any] = plain({name: asdict(settings)[name] for name in kind.MEASURED})
    return found


def _require_same(planned: Planned, kind: ModuleType, record: Record) -> None:
    """Raise UserError if a check was recorded with settings that make its record useless."""
    wanted = _measured_with(kind, planned.settings)
    problems = [
        f"{name} was {record.settings.get(name)!r}, is {value!r}"
        for name, value in wanted.items()
        if record.settings.get(name) != value
    ]
    if problems:
        raise UserError(
            f"{planned.name} was recorded with other settings:",
            problems,
            "Record it again: --update --why REASON.",
        )


def _missing(planned: Planned, baseline: Baseline) -> str:
    hardware = bool(check_kinds()[planned.kind].HARDWARE)
    if hardware and baseline.unlike():
        return f"unlike machines are not compared; {' | '.join(baseline.unlike())}"
    path = baseline.path(hardware=hardware)
    others = "" if path.is_file() else ", ".join(baseline.others())
    others = f"; engines of other kinds that were: {others}" if others else ""
    return f"nothing was recorded of it in {path} (--record does){others}"


def _waived(result: Result, waivers: Sequence[Waiver]) -> Result:
    """A result whose regressions somebody has waived."""
    valid = {w.name: w for w in waivers if not expired(w)}
    used: dict[str, Waiver] = {}
    figures = []
    for figure in result.figures:
        name = next((n for n in (f"{result.check}.{figure.name}", result.check) if n in valid), None)
        if figure.status is Status.REGRESS and name is not None:
            used[name] = valid[name]
            note = f"{figure.note}; waived: {valid[name].why}".removeprefix("; ")
            figure = replace(figure, status=Status.PASS, note=note)
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
        "before": None if subject.before is None else str(subject.before),
        "reference": None if subject.reference is None else str(subject.reference),
        "baseline": {
            "directory": str(baseline.directory),
            "key": asdict(baseline.key),
            "engine": baseline.facts(),
            "history": _history(baseline),
        },
        "suite": str(suite.path),
        "machine": {**baseline.machine, "fingerprint": baseline.fingerprint},
        "changes": changes.to_json(),
    }


def _history(baseline: Baseline) -> list[Mapping[str, Any]]:
    return [*baseline.history(hardware=False), *baseline.history(hardware=True)]


def open_baseline(directory: Path, subject: Subject) -> Baseline:
    """The baselines in a directory for an engine on this machine."""
    return Baseline(directory, subject.key, machine())
