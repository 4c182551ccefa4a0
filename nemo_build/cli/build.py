# SPDX-License-Identifier: Apache-2.0
"""``nemo-build build``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nemo_build.cli._console import bars, force_option, json_option, print_json, size
from nemo_build.engines.options import ACTIVATIONS, WEIGHTS

if TYPE_CHECKING:
    from nemo_build.engines.build import BuildOptions

_MAX_MEMORY = 1e9


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between them."""
    if value is None:
        return None
    words = value.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers like 1,8,32", ctx, param)
    return tuple(dict.fromkeys(int(word) for word in words))


@click.command(epilog="\b\nKIND of --weights:\n" + "\n".join(f"  {k:9} {v}" for k, v in WEIGHTS.items()))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Directory of the engine, or of several.")
@click.option(
    "--target",
    "targets",
    default="cpu",
    show_default=True,
    metavar="NAME[,NAME…]",
    help="The device to build for (nemo-build targets); of several, each engine goes to OUT/NAME.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="What is to run the engine (nemo-build targets)  [default: the target's first that builds]",
)
@click.option("--max-sequences", type=int, default=8, show_default=True, help="Sequences at a time.")
@click.option("--max-context", type=int, help="Positions per sequence  [default: the model's, at most 8192]")
@click.option("--memory", type=float, help="GiB that the engine may use  [default: the target's]")
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
@click.option(
    "--phases",
    default="decode,prefill",
    show_default=True,
    help="For GPUs: the graphs; TensorRT-RTX has the weights in each. decode alone takes prompts 8 tokens at a time.",
)
@click.option(
    "--gpus",
    default="target",
    show_default=True,
    metavar="target|all",
    help="For TensorRT-RTX: build for the target's GPU, or one engine for all that it knows.",
)
@click.option(
    "--timing-cache",
    type=click.Path(dir_okay=False),
    help="For TensorRT: the file that keeps how fast kernels are  [default: one in the build cache]",
)
@click.option(
    "--optimization-level",
    type=int,
    metavar="0..5",
    help="For TensorRT: how long it searches for faster kernels  [default: 3]",
)
@click.option("--on", metavar="ray://HOST:PORT", help="Build on the nodes of a Ray cluster.")
@click.option("--no-cache", is_flag=True, help="Neither take the engine from the build cache nor add it.")
@force_option
@click.option(
    "--plan", "only_plan", is_flag=True, help="Only work out what would fit, and how fast it could be."
)
@click.option(
    "--sequences",
    callback=_numbers,
    metavar="N,N…",
    help="With --plan: sequences at a time  [default: --max-sequences if given, else 1,8,32,128]",
)
@click.option(
    "--context",
    "contexts",
    callback=_numbers,
    metavar="N,N…",
    help="With --plan: positions per sequence  [default: --max-context if given, else 8K to 1M]",
)
@click.option("--state-type", metavar="TYPE", help="With --plan: in what states are held  [default: float32]")
@click.option(
    "--cache-type",
    metavar="TYPE",
    help="With --plan: in what keys and values are held  [default: float32 on a CPU, else bfloat16]",
)
@click.option("--bandwidth", type=float, help="With --plan: GB/s of the memory  [default: the target's]")
@json_option
def command(
    bundle: Path,
    out: Path | None,
    targets: str,
    backend: str | None,
    max_sequences: int,
    max_context: int | None,
    memory: float | None,
    weights: str,
    activations: str,
    phases: str,
    gpus: str,
    timing_cache: str | None,
    optimization_level: int | None,
    on: str | None,
    no_cache: bool,
    force: bool,
    only_plan: bool,
    sequences: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
    state_type: str | None,
    cache_type: str | None,
    bandwidth: float | None,
    as_json: bool,
) -> None:
    """Turn a model BUNDLE into an engine for one target, or for several.

    Two builds of the same inputs are byte-identical; the second comes from the build cache. With --plan nothing is
    built or written: the arithmetic of memory and bandwidth, batch by context.
    """
    from nemo_build.engines.build import BuildOptions
    from nemo_build.engines.targets import find_target

    names = tuple(dict.fromkeys(name.strip() for name in targets.split(",")))
    for name in names:
        find_target(name)
    if memory is not None and not 0 < memory < _MAX_MEMORY:
        raise click.BadParameter(f"{memory} is not a size in GiB", param_hint="--memory")
    if bandwidth is not None and not 0 < bandwidth < _MAX_MEMORY:
        raise click.BadParameter(f"{bandwidth} is not a bandwidth in GB/s", param_hint="--bandwidth")
    limit = None if memory is None else int(memory * (1 << 30))
    asked = {
        "sequences": sequences,
        "contexts": contexts,
        "state_type": state_type,
        "cache_type": cache_type,
        "bandwidth": bandwidth,
    }
    if only_plan:
        asked = _with_sizes(asked, max_sequences, max_context)
        count = len(phases.split(","))
        _plan(bundle, names, as_json, memory=limit, weights=weights, phases=count, **asked)
        return
    if any(value is not None for value in asked.values()):
        raise click.UsageError(
            "--sequences, --context, --state-type, --cache-type and --bandwidth go with --plan."
        )
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out', which only --plan does without.")
    options = BuildOptions(
        max_sequences,
        max_context,
        limit,
        weights,
        activations,
        phases,
        gpus,
        timing_cache,
        optimization_level,
        backend,
    )
    if len(names) > 1 or on is not None:
        from nemo_build.cli._fanout import build_all

        build_all(bundle, out, names, options, on=on, use_cache=not no_cache, force=force, as_json=as_json)
    else:
        _build(bundle, out, names[0], options, use_cache=not no_cache, force=force, as_json=as_json)


def _with_sizes(asked: dict[str, Any], max_sequences: int, max_context: int | None) -> dict[str, Any]:
    """What a plan is asked for; where it says no sizes, those that were given for the engine are meant."""
    given = click.get_current_context().get_parameter_source("max_sequences")
    if asked["sequences"] is None and given is ParameterSource.COMMANDLINE:
        asked = {**asked, "sequences": (max_sequences,)}
    if asked["contexts"] is None and max_context is not None:
        asked = {**asked, "contexts": (max_context,)}
    return asked


def _build(
    bundle: Path,
    out: Path,
    target: str,
    options: BuildOptions,
    *,
    use_cache: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Build one engine in this process, and tell what came of it."""
    from nemo_build.engines.build import build_engine

    with bars() as progress:
        result = build_engine(
            bundle, out, target, options, use_cache=use_cache, force=force, progress=progress
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


def _plan(bundle: Path, names: tuple[str, ...], as_json: bool, **asked: Any) -> None:
    """Show the plans of all targets; then raise PlanError if there are targets that nothing fits."""
    from nemo_build.cli._plan import show_plan
    from nemo_build.engines.forecast import PlanOptions, forecast, require_all
    from nemo_build.engines.targets import TARGETS

    options = PlanOptions(**{name: value for name, value in asked.items() if value is not None})
    plans = [forecast(bundle, TARGETS[name], options) for name in names]
    if as_json:
        print_json({"plans": [plan.to_json() for plan in plans]})
    else:
        for number, plan in enumerate(plans):
            if number:
                click.echo()
            show_plan(plan)
    require_all(plans)
