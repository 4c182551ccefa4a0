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
    """Take the demo checkpoint that ships with nemo-build the whole way, and let it write."""
    from nemo_build.demo import CHECKPOINT

    with nullcontext(str(out)) if out else tempfile.TemporaryDirectory(prefix="nemo-build-") as folder:
        bundle, engine = f"{folder}/bundle", f"{folder}/engine"
        again = ["--force"] if out else []
        _run("export", str(CHECKPOINT), "-o", bundle, *again)
        _run("build", bundle, "-o", engine, "--target", "cpu", *again)
        _run("inspect", engine)
        for prompt in _PROMPTS:
            _run(
                "generate",
                engine,
                prompt,
                "--max-tokens",
                str(max_tokens),
                "--seed",
                "1",
                "--temperature",
                "0.7",
            )


def _run(*arguments: str) -> None:
    """Run a verb in this process, after showing it as one would type it."""
    from nemo_build.cli import cli

    click.secho(f"\n$ nemo-build {shlex.join(arguments)}", bold=True)
    cli.main(args=list(arguments), prog_name="nemo-build", standalone_mode=False)
