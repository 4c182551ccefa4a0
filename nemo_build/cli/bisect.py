# SPDX-License-Identifier: Apache-2.0
"""``nemo-build bisect``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nemo_build.cli._console import check_text, json_option, print_json, table
from nemo_build.errors import UserError

if TYPE_CHECKING:
    from nemo_build.engines.check.bisect import Bisected


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--text", help="What both read  [default: the beginning of a text of ours]")
@click.option("--tokens", metavar="N,N,…", help="The same as token ids.")
@click.option("--graph", default="target", show_default=True, help="target or mtp.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.02,
    show_default=True,
    help="Relative difference of a value that is none. Two builds with equal options need 0.",
)
@click.option(
    "--all", "every", is_flag=True, help="Show all values, not those around the first that differs."
)
@json_option
def command(
    a: Path,
    b: Path,
    text: str | None,
    tokens: str | None,
    graph: str,
    tolerance: float,
    every: bool,
    as_json: bool,
) -> None:
    """Find the first op whose output differs between A, which is right, and B: engines or model bundles.

    Both run on the CPU, whatever they were built with; engines for a GPU hold no graph that could be looked into.

    Exit status: 0 nothing differs beyond the tolerance, 1 something does, 2 they cannot be compared.
    """
    from nemo_build.engines.check.bisect import bisect

    if text is not None and tokens is not None:
        raise click.UsageError("--text and --tokens say the same; give one of them.")
    try:
        found = bisect(a, b, _tokens(a, text, tokens), graph=graph, tolerance=tolerance)
    except (UserError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, every)
    sys.exit(0 if found.first is None else 1)


def _tokens(path: Path, text: str | None, tokens: str | None) -> list[int] | None:
    if tokens is not None:
        words = [w.strip() for w in tokens.split(",")]
        if not all(w.isascii() and w.isdecimal() for w in words):
            raise UserError(f"--tokens {tokens!r} is not whole numbers between commas.")
        return [int(w) for w in words]
    if text is None:
        return None
    from nemo_build.runtime.tokenizer import Tokenizer

    return Tokenizer.load(path).encode(check_text(text, "The text"), add_special_tokens=True)


_AROUND = 6


def _show(found: Bisected, every: bool) -> None:
    steps = found.steps
    if found.source is not None and not every:
        place = steps.index(found.source)
        steps = steps[max(0, place - _AROUND) : place + _AROUND + 1]
    elif not every:
        steps = steps[-1:]
    rows = [
        (
            "->" if found.source is not None and s.name == found.source.name else "",
            s.name,
            s.op,
            f"{s.error:.3g}",
            f"{s.inherited:.3g}",
            "" if s.position is None else str(s.position),
        )
        for s in steps
    ]
    title = f"{found.graph} on {len(found.tokens)} tokens, {len(found.steps)} values compared"
    table(title, rows, ("", "value", "op", "error", "of its inputs", "from token"))
    for name, values in ((found.a, found.only_a), (found.b, found.only_b)):
        if values:
            click.echo(f"only in {name}: {', '.join(values[:8])}{' …' if len(values) > 8 else ''}")
    if found.first is None:
        click.echo(f"nothing differs by more than {found.tolerance:g}")
        return
    click.echo(f"first beyond {found.tolerance:g}: {found.first.name} ({found.first.op})")
    if found.source is not None and found.source.name != found.first.name:
        click.echo(f"first with an error of its own: {found.source.name} ({found.source.op})")
