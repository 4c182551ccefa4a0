# SPDX-License-Identifier: Apache-2.0
"""``nemo-build build``."""

from __future__ import annotations

from pathlib import Path

import click

from nemo_build.cli._console import bars, force_option, json_option, print_json, size
from nemo_build.engines.options import ACTIVATIONS, WEIGHTS

_MAX_MEMORY = 1e9


@click.command(epilog="\b\nKIND of --weights:\n" + "\n".join(f"  {k:9} {v}" for k, v in WEIGHTS.items()))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory of the engine.")
@click.option("--target", default="cpu", show_default=True, help="The device to build for.")
@click.option("--max-sequences", type=int, default=8, show_default=True, help="Sequences at a time.")
@click.option("--max-context", type=int, help="Positions per sequence  [default: the model's, at most 8192]")
@click.option("--memory", type=float, help="GiB that the engine may use  [default: the machine's]")
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    metavar="KIND",
    help="How the engine holds them; see below.",
)
@click.option(
    "--activations",
    default="auto",
    show_default=True,
    metavar="TYPE",
    help=f"What projections round their inputs to: {', '.join(ACTIVATIONS)}; auto is the checkpoint's own type.",
)
@click.option("--no-cache", is_flag=True, help="Neither take the engine from the build cache nor add it.")
@force_option
@json_option
def command(
    bundle: Path,
    out: Path,
    target: str,
    max_sequences: int,
    max_context: int | None,
    memory: float | None,
    weights: str,
    activations: str,
    no_cache: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Turn a model BUNDLE into an engine for one target.

    Two builds of the same inputs are byte-identical; the second comes from the build cache.
    """
    from nemo_build.engines.build import BuildOptions, build_engine

    if memory is not None and not 0 < memory < _MAX_MEMORY:
        raise click.BadParameter(f"{memory} is not a size in GiB", param_hint="--memory")
    limit = None if memory is None else int(memory * (1 << 30))
    options = BuildOptions(max_sequences, max_context, limit, weights, activations)
    with bars() as progress:
        result = build_engine(
            bundle, out, target, options, use_cache=not no_cache, force=force, progress=progress
        )
    plan = result.plan
    if as_json:
        print_json({"out": str(out), "key": result.key, "cached": result.cached, "plan": plan.to_json()})
        return
    click.echo(f"{out}: engine for {target}" + (" (from the build cache)" if result.cached else ""))
    click.echo(
        f"memory {size(plan.total)}: weights {size(plan.weights_memory)} ({size(plan.weights_file)} on disk), "
        f"{plan.slots} sequences x (state {size(plan.state // plan.slots)} + "
        f"cache {size(plan.cache // plan.slots)} for {plan.context} positions), "
        f"activations {size(plan.activations)}"
    )
