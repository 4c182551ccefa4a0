# SPDX-License-Identifier: Apache-2.0
"""``nemo-build triton``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_build.cli._console import force_option
from nemo_build.cli._sampling import serving_options
from nemo_build.errors import UserError

if TYPE_CHECKING:
    from nemo_build.triton_repo.render import Rendered

_IMAGE = "nvcr.io/nvidia/tritonserver:25.12-py3"


@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Directory of the model repository.")
@serving_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads of each model  [default: all]")
@click.option(
    "--max-waiting", type=click.IntRange(1), default=256, show_default=True, help="Requests that may wait."
)
@click.option(
    "--in-process", is_flag=True, help="One model that holds the whole engine: no models for steps."
)
@click.option("--reference", is_flag=True, help="Refer to the engine where it is, by its absolute path.")
@click.option("--add-version", is_flag=True, help="Add the engine to an existing repository.")
@force_option
@click.option("--run", "runs", is_flag=True, help="Start a server for development on it, and keep it going.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--metrics-port", type=click.IntRange(1, 65535), default=8002, show_default=True)
@click.option(
    "--reload", "reloaded", metavar="HOST:PORT", help="Have a server change to the newest version of it."
)
@click.option(
    "--probe", "probed", metavar="HOST:PORT", help="Ask a server for a token; exit status 1 if none comes."
)
@click.option("--probe-timeout", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds.")
def command(
    engine: Path | None,
    out: Path | None,
    runs: bool,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    reloaded: str | None,
    probed: str | None,
    probe_timeout: float,
    **options: Any,
) -> None:
    """Make a model repository for Triton Inference Server of an ENGINE, or do something with a server that has it.

    The ports are those of this machine's loopback address; HOST:PORT is that of a server's HTTP interface.
    """
    if probed is not None:
        _probe(probed, probe_timeout)
        return
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    if engine is not None:
        _report(_render(engine, out, **options))
    if reloaded is not None:
        from nemo_build.triton_repo.control import Control
        from nemo_build.triton_repo.supervisor import reload

        reload(out, Control(reloaded), _say)
    elif runs:
        from nemo_build.triton_repo.server import Ports
        from nemo_build.triton_repo.supervisor import Supervisor

        Supervisor(out, Ports(http_port, grpc_port, metrics_port), _say).run()
    elif engine is None:
        raise click.UsageError("There is nothing to do: give an ENGINE, --run, --reload or --probe.")


def _probe(address: str, seconds: float) -> None:
    from nemo_build.triton_repo.control import Control

    problem = Control(address).probe(seconds)
    if problem is not None:
        raise UserError(problem)


def _render(
    engine: Path,
    out: Path,
    *,
    in_process: bool,
    reference: bool,
    add_version: bool,
    force: bool,
    max_waiting: int,
    **options: Any,
) -> Rendered:
    from nemo_build.runtime.opening import Options
    from nemo_build.triton_repo import render

    ways: dict[str, Any] = {"in_process": in_process, "reference": reference, "most_waiting": max_waiting}
    if not add_version:
        return render.render(engine, out, Options(**options), **ways, force=force)
    if force:
        raise click.UsageError("--add-version and --force exclude each other.")
    return render.add_version(engine, out, Options(**options), **ways)


def _report(rendered: Rendered) -> None:
    where = rendered.repository.resolve()
    loads = " ".join(f"--load-model={name}" for name in (*rendered.models, "generate"))
    click.echo(f"{rendered.repository}: version {rendered.version}: generate {' '.join(rendered.models)}")
    click.echo(
        f"In an image with nemo-build on top of {_IMAGE}, or a later one, with {where} at /models:\n"
        f"  tritonserver --model-repository=/models --model-control-mode=explicit {loads}"
    )


def _say(line: str) -> None:
    """A line of ours among the server's own."""
    click.echo(f"nemo-build: {line}", err=True)
    sys.stderr.flush()
