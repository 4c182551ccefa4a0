# SPDX-License-Identifier: Apache-2.0
"""``nemo-build demo``."""

from __future__ import annotations

import shlex
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click

_PROMPTS = ("The :mod:`json` module", "def read_lines(path):\n")


@click.command()
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Keep bundle and engine here  [default: throw away]"
)
@click.option("--max-tokens", type=int, default=80, show_default=True, help="Tokens to write per prompt.")
def command(out: Path | None, max_tokens: int) -> None:
    """Take the demo checkpoint and drafters that ship with nemo-build the whole way, and let them write."""
    from nemo_build.demo import CHECKPOINT, DRAFTERS

    with nullcontext(str(out)) if out else tempfile.TemporaryDirectory(prefix="nemo-build-") as folder:
        bundle, engine = f"{folder}/bundle", f"{folder}/engine"
        again = ["--force"] if out else []
        drafts = [option for path in DRAFTERS.values() for option in ("--draft", str(path))]
        _run("export", str(CHECKPOINT), "-o", bundle, *drafts, *again)
        _run("build", bundle, "-o", engine, "--target", "cpu", *again)
        _run("inspect", engine)
        options = ["--max-tokens", str(max_tokens), "--seed", "1", "--temperature", "0.7"]
        for prompt in _PROMPTS:
            _run("generate", engine, prompt, *options)
        _run("generate", engine, _PROMPTS[0], *options, "--speculate", "dspark")


def _run(*arguments: str) -> None:
    """Run a verb in this process, after showing it as one would type it."""
    from nemo_build.cli import cli

    click.secho(f"\n$ nemo-build {shlex.join(arguments)}", bold=True)
    cli.main(args=list(arguments), prog_name="nemo-build", standalone_mode=False)
