# SPDX-License-Identifier: Apache-2.0
"""``nemo-build bench``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from nemo_build.cli._console import print_json
from nemo_build.cli._sampling import sampling_options

_STDOUT = "-"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _list(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Words between commas."""
    words = tuple(word.strip() for word in value.split(","))
    if not all(words):
        raise click.BadParameter(f"{value!r} has an empty place between commas", ctx=ctx, param=param)
    return words


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    return tuple(_whole(word, "a whole number", ctx, param) for word in _list(ctx, param, value))


def _lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int | None, ...]:
    """Draft lengths between commas; None for ``auto``."""
    words = _list(ctx, param, value)
    return tuple(
        None if word == "auto" else _whole(word, "a whole number or auto", ctx, param) for word in words
    )


def _whole(word: str, wanted: str, ctx: click.Context, param: click.Parameter) -> int:
    if not (word.isascii() and word.isdecimal()) or len(word) > 6 or int(word) == 0:
        raise click.BadParameter(f"{word!r} is not {wanted} of at least 1", ctx=ctx, param=param)
    return int(word)


def _rate(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a number above 0", ctx=ctx, param=param)
    return value


def _sampling_options(function: _Command) -> _Command:
    """The options that ``generate`` has, but for ``--max-tokens``, which is ``--output-len`` here."""
    function = sampling_options(function)
    parameters: list[click.Parameter] = function.__click_params__  # type: ignore[attr-defined]
    parameters[:] = [p for p in parameters if p.name != "max_tokens"]
    return function


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--concurrency",
    default="1",
    show_default=True,
    metavar="N,N,…",
    callback=_numbers,
    help="Sequences at a time.",
)
@click.option(
    "--speculate",
    "speculators",
    default="none",
    show_default=True,
    metavar="NAME,NAME,…",
    callback=_list,
    help="Speculators, such as mtp, and none; all: none and every one that the engine has the graphs for.",
)
@click.option(
    "--draft-len",
    "draft_lengths",
    default="auto",
    show_default=True,
    metavar="N|auto,…",
    callback=_lengths,
    help="Drafts in a step; auto: as many as pay.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='Lines of {"text" or "tokens" or "messages": …, "category": …}  [default: texts of ours]',
)
@click.option("--input-len", type=click.IntRange(1), help="Tokens of a prompt  [default: as the prompts are]")
@click.option(
    "--output-len", type=click.IntRange(1), default=128, show_default=True, help="Most tokens of an answer."
)
@click.option("--ignore-eos", is_flag=True, help="Write so many tokens even where the text would have ended.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="Requests of a run  [default: every prompt once, at least two a stream]",
)
@click.option(
    "--request-rate",
    type=float,
    callback=_rate,
    metavar="R",
    help="R requests a second on average, at random times  [default: each follows its predecessor]",
)
@click.option("--warmup", type=click.IntRange(0), help="Requests before each run  [default: one a stream]")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Times that all settings are measured, in turn.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads  [default: all]")
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare greedy texts with plain decoding's; exit with 1 if one differs.",
)
@_sampling_options
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=_STDOUT,
    metavar="[FILE]",
    help="Write the report as JSON; without FILE, print it in place of the tables.",
)
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots."
)
def command(
    engine: Path,
    concurrency: tuple[int, ...],
    speculators: tuple[str, ...],
    draft_lengths: tuple[int | None, ...],
    prompts: Path | None,
    input_len: int | None,
    output_len: int,
    ignore_eos: bool,
    requests: int | None,
    request_rate: float | None,
    warmup: int | None,
    rounds: int,
    threads: int | None,
    check: bool,
    json_file: str | None,
    html_file: Path | None,
    **sampling: Any,
) -> None:
    """Measure an ENGINE: latencies, tokens per second, and what speculation brings.

    All combinations of --concurrency, --speculate and --draft-len are measured in turn. docs/bench.md defines the
    figures.
    """
    from nemo_build.runtime.bench import Bench, BenchOptions
    from nemo_build.runtime.bench.prompts import DEFAULT_PROMPTS
    from nemo_build.runtime.bench.report import build_report, check_writable, require_equal

    for path in _files(json_file, html_file):
        check_writable(path)
    options = BenchOptions(
        concurrency=concurrency,
        speculators=speculators,
        draft_lengths=draft_lengths,
        requests=requests,
        input_length=input_len,
        output_length=output_len,
        ignore_eos=ignore_eos,
        rate=request_rate,
        warm_up=warmup,
        rounds=rounds,
        prompts=prompts or DEFAULT_PROMPTS,
        threads=threads,
        check=check,
        sampling={name: value for name, value in sampling.items() if value not in (None, ())},
    )
    bench = Bench(engine, options)
    with _progress() as progress:
        results = bench.run(progress)
    report = build_report(bench, results)
    _tell(report, json_file, html_file)
    if results.interrupted:
        raise KeyboardInterrupt
    require_equal(report)


def _files(json_file: str | None, html_file: Path | None) -> list[Path]:
    """The files to write. Raises UsageError if they are one."""
    found = [] if json_file in (None, _STDOUT) else [Path(str(json_file))]
    if html_file is not None:
        if html_file in found:
            raise click.UsageError(f"--json and --html both name {html_file}.")
        found.append(html_file)
    return found


def _tell(report: dict[str, Any], json_file: str | None, html_file: Path | None) -> None:
    """Print the report and write its files."""
    import json

    from nemo_build.bundle import publish_file
    from nemo_build.runtime.bench.report import report_page, report_text

    if json_file == _STDOUT:
        print_json(report)
    else:
        click.echo(report_text(report))
        if json_file is not None:
            publish_file(Path(json_file), json.dumps(report, indent=1) + "\n")
    if html_file is not None:
        publish_file(html_file, report_page(report))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show what is being measured on standard error; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Drawing takes processor time from what is measured, so it is seldom.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=1
    ) as bar:
        task = bar.add_task("loading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
