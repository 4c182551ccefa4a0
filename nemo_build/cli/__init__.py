# SPDX-License-Identifier: Apache-2.0
"""The command line: one module a verb, found by looking in this folder.

A verb's module defines ``command``, a click command. It imports at its top only what is light, so that
``nemo-build --help`` stays quick; the work is imported when the verb runs.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from types import FrameType
from typing import Any

import click

from nemo_build import __version__
from nemo_build.errors import UserError


class _Verbs(click.Group):
    """A group whose commands are the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nemo-build")
def cli() -> None:
    """Turn Nemotron-H checkpoints into deployable engines."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 the input or the machine is at fault, 2 wrong usage, 130 interrupted."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        cli.main(args=arguments, prog_name="nemo-build", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(1)


def _terminate(number: int, frame: FrameType | None) -> Any:
    """Leave through the exception handlers, so that nothing half-written stays behind."""
    sys.exit(128 + number)
