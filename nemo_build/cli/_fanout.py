# SPDX-License-Identifier: Apache-2.0
"""Builds for several targets: what is asked for, and how progress and outcomes are shown."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_build.cli._console import Bars, bars, print_json, size

if TYPE_CHECKING:
    from nemo_build.engines.build import BuildOptions
    from nemo_build.engines.fanout import Outcome
    from nemo_build.engines.worker import BuildJob


def build_all(
    bundle: Path,
    out: Path,
    targets: tuple[str, ...],
    options: BuildOptions,
    *,
    on: str | None,
    use_cache: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Build an engine for each target, on this machine or on a cluster, and tell how each went.

    Raises UserError that lists all that failed, after all have ended.
    """
    from nemo_build.engines.fanout import LocalRunner, Runner, fan_out, require_all
    from nemo_build.engines.plan import host_memory
    from nemo_build.engines.worker import BuildJob
    from nemo_build.settings import threads

    where = str(bundle.resolve())
    jobs = [
        BuildJob(name, where, str(_folder(out, name, targets)), name, options, use_cache, force)
        for name in targets
    ]
    with bars() as shown, ExitStack() as stack:
        runner: Runner
        if on is None:
            runner, limits = LocalRunner(), {"memory": host_memory(), "at_most": threads()}
        else:
            from nemo_build.engines.remote import RayRunner

            runner, limits = stack.enter_context(RayRunner(on)), {}
        needs = _needs(bundle) if on is None else (lambda job: 0)
        outcomes = fan_out(jobs, runner, _Shown(shown).report, needs=needs, **limits)
    if as_json:
        print_json({"engines": [_to_json(o) for o in outcomes]})
    else:
        for outcome in outcomes:
            _tell(outcome)
    require_all(outcomes)


def _folder(out: Path, name: str, targets: tuple[str, ...]) -> Path:
    """Where a target's engine goes: a single one to OUT itself, several below it."""
    return (out if len(targets) == 1 else out / name).absolute()


def _needs(bundle: Path) -> Any:
    """What a job of this bundle takes of the memory while it runs, in bytes."""
    from nemo_build.bundle import MODEL_BUNDLE, read_manifest
    from nemo_build.engines.footprint import Footprint
    from nemo_build.engines.targets import TARGETS, build_memory

    weights = Footprint.of_manifest(read_manifest(bundle, MODEL_BUNDLE)).nbytes
    return lambda job: build_memory(TARGETS[job.target], weights)


class _Shown:
    """Turns events into progress bars, and log lines into lines on standard error."""

    def __init__(self, shown: Bars) -> None:
        self._bars = shown
        self._phases: dict[str, tuple[Any, int]] = {}

    def report(self, job: BuildJob, event: dict[str, Any]) -> None:
        """Show an event."""
        if event["event"] == "phase":
            advance = self._bars.start(f"{job.name}: {event['what']}", event["total"])
            self._phases[job.name] = (advance, 0)
        elif event["event"] == "done":
            advance, before = self._phases[job.name]
            advance(event["bytes"] - before)
            self._phases[job.name] = (advance, event["bytes"])
        else:
            click.echo(f"{job.name}: {event['line']}", err=True)


def _to_json(outcome: Outcome) -> dict[str, Any]:
    error = None if outcome.error is None else str(outcome.error)
    return {"target": outcome.job.target, "out": outcome.job.out, "error": error, **(outcome.result or {})}


def _tell(outcome: Outcome) -> None:
    if outcome.result is None:
        click.echo(f"{outcome.job.name}: failed")
        return
    cached = " (from the build cache)" if outcome.result["cached"] else ""
    total = size(outcome.result["plan"]["total"])
    click.echo(f"{outcome.job.name}: {outcome.job.out}{cached}, memory {total}")
