# SPDX-License-Identifier: Apache-2.0
"""``nemo-build check``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_build.errors import UserError

if TYPE_CHECKING:
    from nemo_build.engines.check.baseline import Baseline
    from nemo_build.engines.check.subject import Subject
    from nemo_build.engines.check.suite import Suite

_FILE = click.Path(path_type=Path, dir_okay=False)
_BROKEN = 2


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else [word.strip() for word in value.split(",") if word.strip()]


@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option(
    "--suite", type=click.Path(path_type=Path), help="What is checked, a YAML file  [default: all of ours]"
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    default="baselines",
    show_default=True,
    metavar="DIR",
    help="What was recorded; meant to be committed.",
)
@click.option("--only", callback=_names, metavar="NAME,NAME,…", help="Only these checks of the suite.")
@click.option(
    "--speculate",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="The speculator it is checked with.",
)
@click.option(
    "--before",
    type=click.Path(path_type=Path),
    metavar="ENGINE",
    help="Measure speed beside this engine, by turns.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    help="Compare logits with those of this model bundle in float32 too, and time a build of it.",
)
@click.option("--record", is_flag=True, help="Record what was not recorded yet; nothing is judged.")
@click.option("--update", is_flag=True, help="Record anew, and show what changes; needs --why.")
@click.option(
    "--waive", metavar="CHECK[.FIGURE]", help="Let a regression pass for a while; needs --expires and --why."
)
@click.option("--expires", metavar="YYYY-MM-DD", help="The last day of a waiver.")
@click.option("--why", help="The reason of --update or --waive; it is kept.")
@click.option("--json", "json_", type=_FILE, metavar="FILE", help="Write the report as JSON.")
@click.option("--junit", type=_FILE, metavar="FILE", help="… as JUnit's XML.")
@click.option("--markdown", type=_FILE, metavar="FILE", help="… for a pull request.")
@click.option("--html", type=_FILE, metavar="FILE", help="… as a page with plots.")
def command(
    engine: Path | None,
    suite: Path | None,
    baseline: Path,
    only: list[str] | None,
    speculate: str,
    before: Path | None,
    reference: Path | None,
    record: bool,
    update: bool,
    waive: str | None,
    expires: str | None,
    why: str | None,
    json_: Path | None,
    junit: Path | None,
    markdown: Path | None,
    html: Path | None,
) -> None:
    """Check that an ENGINE is as good as one that was recorded.

    Exit status: 0 it is, 1 it got worse, 2 it, its baseline or a check is broken, or the command was wrong, 3 something
    was not checked. docs/check.md says what is checked and how.
    """
    _require_one(record, update, waive, expires, why)
    try:
        if waive is not None:
            _waive(baseline, _suite(suite, None), waive, str(expires), str(why))
            return
        if engine is None:
            raise click.UsageError("Missing argument 'ENGINE'.")
        files = {"json": json_, "junit": junit, "markdown": markdown, "html": html}
        status = _run(
            engine,
            _suite(suite, only),
            baseline,
            {"speculator": speculate, "before": before, "reference": reference},
            {name: path for name, path in files.items() if path is not None},
            record=record,
            why=why,
        )
    except (UserError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(_BROKEN)
    sys.exit(status)


def _require_one(record: bool, update: bool, waive: str | None, expires: str | None, why: str | None) -> None:
    """Raise UsageError for options that do not go together."""
    if record + update + (waive is not None) > 1:
        raise click.UsageError("--record, --update and --waive exclude each other.")
    if update and not (why or "").strip():
        raise click.UsageError("--update needs a reason: --why.")
    if waive is not None and not (expires and (why or "").strip()):
        raise click.UsageError("--waive needs its last day and a reason: --expires and --why.")
    if why is not None and not (update or waive is not None):
        raise click.UsageError("--why goes with --update or --waive.")
    if expires is not None and waive is None:
        raise click.UsageError("--expires goes with --waive.")


def _suite(path: Path | None, only: list[str] | None) -> Suite:
    from nemo_build.engines.check.suite import DEFAULT, Suite

    found = Suite.load(path or DEFAULT)
    return found if only is None else found.only(only)


def _waive(directory: Path, suite: Suite, name: str, expires: str, why: str) -> None:
    from nemo_build.engines.check.baseline import Waivers
    from nemo_build.engines.check.verdict import Waiver

    suite.only([next((p.name for p in suite.checks if f"{name}.".startswith(f"{p.name}.")), name)])
    Waivers(directory).add(Waiver(name, expires, why))
    click.echo(f"{name} is waived until {expires}")


def _run(
    engine: Path,
    suite: Suite,
    directory: Path,
    options: Mapping[str, Any],
    files: Mapping[str, Path],
    *,
    record: bool,
    why: str | None,
) -> int:
    """Check, or record what was not recorded yet or, with a reason, all; returns the exit status."""
    from nemo_build.engines.check.run import check, open_baseline
    from nemo_build.engines.check.subject import Subject
    from nemo_build.runtime.bench.report import check_writable

    for path in files.values():
        check_writable(path)
    subject = Subject(engine, **options)
    baseline = open_baseline(directory, subject)
    if record or why is not None:
        return _record(subject, suite, baseline, why)
    with _progress(len(suite.checks)) as progress:
        verdict = check(subject, suite, baseline, progress)
    _tell(verdict.to_json(), files)
    return verdict.exit_code


def _record(subject: Subject, suite: Suite, baseline: Baseline, why: str | None) -> int:
    from nemo_build.cli._console import table
    from nemo_build.engines.check.reports import value_text
    from nemo_build.engines.check.run import differences, measure, recorded_changes, unrecorded

    if why is None:
        missing = unrecorded(suite, baseline)
        if not missing.checks:
            raise UserError(
                f"All of it was recorded already in {baseline.directory}.",
                hint="--update --why REASON records it anew.",
            )
        suite = missing
    with _progress(len(suite.checks)) as progress:
        measured = measure(subject, suite, progress)
    changed = differences(measured, suite, baseline)
    for change in recorded_changes(subject, suite, baseline).to_json():
        click.echo(change["text"])
    if changed:
        rows = [
            (name, "" if a is None else value_text(a), "" if b is None else value_text(b))
            for name, a, b in changed
        ]
        table("what changes", rows, ("figure", "recorded", "now"))
    for path in baseline.write(measured.data, subject.facts, why or "first record"):
        click.echo(f"wrote {path}")
    for name, reason in measured.skipped.items():
        click.echo(f"{name} was not recorded: {reason}", err=True)
    return 0


def _tell(report: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    from nemo_build.bundle import publish_file
    from nemo_build.engines.check.reports import REPORTS, text_report

    click.echo(text_report(report))
    for name, path in files.items():
        publish_file(path, REPORTS[name](report))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show which check runs, on standard error; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Drawing takes processor time from what is measured, so it is seldom.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=1
    ) as bar:
        task = bar.add_task("opening", total=total, completed=-1)

        def show(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield show
