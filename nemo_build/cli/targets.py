# SPDX-License-Identifier: Apache-2.0
"""``nemo-build targets``."""

from __future__ import annotations

from pathlib import Path

import click

from nemo_build.cli._console import json_option, print_json, size, table


@click.command()
@click.option(
    "--fits", "bundle", type=click.Path(path_type=Path), help="What of a model bundle fits each of them."
)
@json_option
def command(bundle: Path | None, as_json: bool) -> None:
    """Show the devices an engine can be made for, what they can do, and what follows from it."""
    from nemo_build.engines.targets import TARGETS

    if bundle is not None:
        _fits(bundle, as_json)
        return
    if as_json:
        print_json([t.to_json() for t in TARGETS.values()])
        return
    rows = []
    for t in TARGETS.values():
        d = t.to_json()
        rows.append(
            (
                t.name,
                t.product,
                "" if t.sm is None else f"{t.sm}",
                "the machine's" if t.memory_gb is None else f"{t.memory_gb:g} GB",
                "" if t.bandwidth_gbs is None else f"{t.bandwidth_gbs:g} GB/s",
                " ".join(d["weights"]),
                ", ".join(f"{n} {k}" if k else n for n, k in d["speculators"]),
                ", ".join(n if state == "builds" else f"({n})" for n, state in d["backends"].items()),
            )
        )
    header = ("target", "product", "SM", "memory", "bandwidth", "weight formats", "drafts", "backends")
    table("", rows, header)
    click.echo(
        "\nIn brackets: not in this version. Sources and defaults: --json; rules: docs/design.md, section 7."
    )


def _fits(bundle: Path, as_json: bool) -> None:
    """What of a bundle fits each target: longest context of one sequence, most sequences by context."""
    from nemo_build.engines.forecast import PlanOptions, forecast
    from nemo_build.engines.targets import TARGETS

    plans = [forecast(bundle, t, PlanOptions(sequences=(1,))) for t in TARGETS.values()]
    if as_json:
        print_json(
            [
                {
                    "target": p.target.name,
                    "available_bytes": p.sizing.available,
                    "weights_bytes": p.sizing.weights_memory,
                    "longest_context": p.sizing.longest_context(),
                    "most_sequences": p.at_most(),
                }
                for p in plans
            ]
        )
        return
    rows = []
    for p in plans:
        longest = p.sizing.longest_context()
        most = [f"{n:,}" if longest else "" for n in p.at_most().values()]
        rows.append(
            (
                p.target.name,
                size(p.sizing.available),
                size(p.sizing.weights_memory),
                f"{longest:,}" if longest else "does not fit",
                *most,
            )
        )
    header = (
        "target",
        "may take",
        "weights",
        "longest context",
        *(f"at {context:,}" for context in plans[0].at_most()),
    )
    table("Most sequences by context", rows, header)
