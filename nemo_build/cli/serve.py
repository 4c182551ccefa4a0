# SPDX-License-Identifier: Apache-2.0
"""``nemo-build serve``."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import logging.config
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_build.cli._console import byte_size
from nemo_build.cli._sampling import serving_options
from nemo_build.errors import UserError

if TYPE_CHECKING:
    from nemo_build.runtime.server.backend import Backend

_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; 0.0.0.0: all of this machine.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."
)
@click.option(
    "--served-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="What the model is called; may be given several times  [default: the engine's directory]",
)
@serving_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads  [default: all]")
@click.option(
    "--api-key", "keys", multiple=True, metavar="KEY", help="Requests need it; may be given several times."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The same, one key a line; other processes cannot see it there.",
)
@click.option(
    "--cors-origin", "origins", multiple=True, metavar="ORIGIN", help="Web pages that may call; *: all."
)
@click.option(
    "--max-waiting", type=click.IntRange(0), default=256, show_default=True, help="Answers that may wait."
)
@click.option(
    "--max-request-bytes",
    default="16M",
    callback=byte_size,
    show_default=True,
    metavar="SIZE",
    help="Largest body of a request.",
)
@click.option(
    "--request-timeout", type=click.FloatRange(0.001), help="Most seconds of an answer  [default: any]"
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Time of answers at the end.",
)
@click.option(
    "--triton",
    metavar="URL",
    help="Generate with this Triton server (http:// or grpc://); ENGINE gives the tokenizer.",
)
@click.option("--metrics-alias", metavar="NAME", help="Export metrics under these names too: vllm.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    engine: Path,
    host: str,
    port: int,
    names: tuple[str, ...],
    keys: tuple[str, ...],
    api_key_file: Path | None,
    origins: tuple[str, ...],
    max_waiting: int,
    max_request_bytes: int,
    request_timeout: float | None,
    drain_seconds: float,
    triton: str | None,
    metrics_alias: str | None,
    log_format: Any,
    **options: Any,
) -> None:
    """Serve an ENGINE to OpenAI's clients and to browsers."""
    if triton is not None:
        _refuse(click.get_current_context(), options)
    _require()
    from nemo_build.runtime.server import logs
    from nemo_build.runtime.server.app import create_app
    from nemo_build.runtime.server.context import Settings
    from nemo_build.runtime.server.run import Server, listen, url_of

    given_keys = (*keys, *_keys(api_key_file))
    logging.config.dictConfig(logs.configuration(log_format))
    with listen(host, port) as listening:
        settings = Settings(
            names,
            given_keys,
            origins,
            max_waiting,
            max_request_bytes,
            request_timeout,
            metrics_alias,
            is_local=ipaddress.ip_address(listening.getsockname()[0]).is_loopback,
        )
        app = create_app(_backend(engine, triton, options), settings)
        url = url_of(listening)

        def ready() -> None:
            click.echo(f"{app.state.server.name} is served at {url} (OpenAI's interface: {url}/v1)")

        server = Server(app, drain_seconds=drain_seconds, ready=ready)
        server.run([listening])
        if not server.started:
            raise UserError("The server did not start; the log above says why.")


def _refuse(ctx: click.Context, options: dict[str, Any]) -> None:
    """Refuse options of an engine that is opened here."""
    given = [p.opts[0] for p in ctx.command.params if p.name in options and _is_given(ctx, p.name)]
    if given:
        raise click.UsageError(f"With --triton, {', '.join(given)} are the Triton server's business.", ctx)


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _require() -> None:
    """Raise UserError if packages of the extra are missing."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"The server needs {', '.join(missing)}.",
            hint="Install them with: pip install 'nemo-build[serve]'",
        )


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [key for key in keys if key and not key.startswith("#")]
    if not found:
        raise UserError(f"{path} has no API key.")
    return found


def _backend(engine: Path, triton: str | None, options: dict[str, Any]) -> Backend:
    if triton is not None:
        from nemo_build.runtime.server.triton import TritonBackend

        return TritonBackend(engine, triton)
    from nemo_build.runtime import Engine
    from nemo_build.runtime.server.backend import EngineBackend

    return EngineBackend(Engine.load(engine, **options), speculate=options["speculate"])
