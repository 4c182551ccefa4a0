# SPDX-License-Identifier: Apache-2.0
"""``nemo-build diff``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nemo_build.cli._console import json_option, print_json
from nemo_build.errors import UserError


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path), help="Write a page to this file as well."
)
@json_option
def command(before: Path, after: Path, html_file: Path | None, as_json: bool) -> None:
    """Show what changed from BEFORE to AFTER: two engines, two model bundles or two checkpoints.

    Exit status: 0 they are equal, 1 they differ, 2 they cannot be compared.
    """
    from nemo_build.bundle import publish_file
    from nemo_build.engines.diff import diff
    from nemo_build.engines.diff_report import diff_page, diff_text

    try:
        found = diff(before, after)
        if html_file is not None:
            publish_file(html_file, diff_page(found))
    except (UserError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(diff_text(found))
    sys.exit(0 if found.equal else 1)
