# SPDX-License-Identifier: Apache-2.0
"""How a plan is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nemo_build.cli._console import key_values, size, table

if TYPE_CHECKING:
    from nemo_build.engines.forecast import Cell, Forecast


def show_plan(plan: Forecast) -> None:
    """Print a plan: the target, the weights, one sequence's state, batch by context, what fits at most."""
    target, options, sizing = plan.target, plan.options, plan.sizing
    bandwidth = "unknown (--bandwidth)" if plan.bandwidth is None else f"{plan.bandwidth:g} GB/s"
    click.echo(
        f"{target.name}: {target.product}, {bandwidth}. Computed from sizes; nothing was built or measured."
    )
    cell = plan.cells[0]
    state, position = cell.state // cell.sequences, cell.cache // (cell.sequences * cell.context)
    key_values(
        {
            "weights": f"{size(sizing.weights_memory)} ({size(sizing.weights_file)} as stored){_copies(plan)}",
            "may take": f"{size(sizing.available)} of {plan.where()}",
            "a sequence": f"recurrent state {size(state)} ({options.state_type}{_twice(plan)}) and {size(position)} "
            f"a position ({options.cache_type})",
            "drafts": _drafts(plan),
            "a build": _build(plan),
        }
    )
    click.echo()
    rows = [
        (name, group, form, size(nbytes))
        for name, part in plan.model.parts.items()
        for (group, form), nbytes in part.groups().items()
    ]
    table("Weights in memory", rows, ("of", "part", "format", "size"))
    click.echo()
    header = ("sequences", "context", "state", "pending", "cache", "scratch", "in all", "", "bound", "each")
    table("Batch by context", [_row(cell) for cell in plan.cells], header)
    click.echo(
        "bound: tokens/s of all sequences (and of each) that reading active weights, states and caches allows at this "
        "bandwidth, without drafts; computed, not measured. Tokens are taken to choose experts independently."
    )
    click.echo()
    at_most = ", ".join(f"{n:,} of {context:,}" for context, n in plan.at_most().items())
    click.echo(f"fits at most: {at_most} positions; one sequence of {sizing.longest_context():,}")


def _build(plan: Forecast) -> str:
    from nemo_build.engines.targets import backends_of, build_memory, builder_of

    builder = builder_of(plan.target)
    if builder is None:
        why = "; ".join(f"{rule.name}: {rule.refusal}" for rule in backends_of(plan.target))
        return f"not in this version ({why})"
    return f"by {builder.name}, takes about {size(build_memory(plan.target, plan.sizing.weights_file))} of memory"


def _copies(plan: Forecast) -> str:
    from nemo_build.engines.targets import builder_of

    builder = builder_of(plan.target)
    return "; graphs share none, there is one for each of --phases" if builder and builder.apart else ""


def _twice(plan: Forecast) -> str:
    return f", {plan.sizing.state_copies} copies" if plan.sizing.state_copies > 1 else ""


def _drafts(plan: Forecast) -> str:
    if plan.speculation is None or not plan.sizing.pending:
        return "none: the bundle has nothing that drafts" + (
            "" if plan.speculation is None else " with weights"
        )
    count = "as many as pay" if plan.speculation.drafts is None else str(plan.speculation.drafts)
    return f"{plan.speculation.name}, {count}; {plan.sizing.pending} tokens of a sequence may be pending"


def _row(cell: Cell) -> tuple[str, ...]:
    bound = "" if cell.bound is None else f"{cell.bound:,.0f}"
    each = "" if cell.bound is None else f"{cell.bound / cell.sequences:,.1f}"
    return (
        f"{cell.sequences:,}",
        f"{cell.context:,}",
        size(cell.state),
        size(cell.pending),
        size(cell.cache),
        size(cell.activations),
        size(cell.total),
        "fits" if cell.fits else "does not fit",
        *((bound, each) if cell.fits else ("", "")),
    )
