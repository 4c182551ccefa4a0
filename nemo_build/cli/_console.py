# SPDX-License-Identifier: Apache-2.0
"""What the verbs share: progress bars, JSON output, sizes for people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from nemo_build.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

_WIDE = 200  # columns of a table that goes into a file or a pipe, whose lines nobody wraps

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
force_option = click.option("--force", is_flag=True, help="Replace the output if it exists.")


def byte_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A number of bytes, in binary units if a letter says so: the callback of an option."""
    found = re.fullmatch(r"(\d{1,15})([KMGT]?)", value.upper())
    if found is None:
        raise click.BadParameter(f"{value!r} is no size such as 512M or 2G", ctx=ctx, param=param)
    return int(found[1]) << _UNITS[found[2]]


def read_text(stream: IO[bytes], what: str) -> str:
    """All of a binary stream as UTF-8 text. Raises UserError if it is not UTF-8."""
    try:
        return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 text: byte {error.start} cannot be decoded.") from error


def check_text(text: str, what: str) -> str:
    """A command-line argument, if it is text. Raises UserError if the shell passed bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not UTF-8 text.") from error
    return text


def print_json(value: object) -> None:
    """Print a value as indented JSON on standard output."""
    click.echo(json.dumps(value, indent=2))


def size(nbytes: float) -> str:
    """A number of bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


def count(number: float) -> str:
    """A number for people: 3.23 B, 41.2 M, 812."""
    for limit, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.2f}{unit}"
    return f"{number:.0f}"


class Bars:
    """Progress bars on standard error; silent where that is no terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a bar of `total` bytes; returns what is to be called with each number of bytes done."""
        task = self._bars.add_task(what, total=total)

        def advance(done: int) -> None:
            self._bars.advance(task, done)

        return advance


@contextmanager
def bars() -> Iterator[Bars]:
    """Show progress bars while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bars(progress)


def table(title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> None:
    """Print a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*header, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(shown)


def key_values(pairs: dict[str, Any]) -> None:
    """Print aligned ``name  value`` lines on standard output."""
    width = max(map(len, pairs))
    for name, value in pairs.items():
        click.echo(f"{name:<{width}}  {value}")
