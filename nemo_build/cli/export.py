# SPDX-License-Identifier: Apache-2.0
"""``nemo-build export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nemo_build.cli._console import count, force_option, json_option, print_json, size

if TYPE_CHECKING:
    from nemo_build.export.ledger import Ledger


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory of the model bundle."
)
@click.option(
    "--weights",
    type=click.Choice(["auto", "link", "reference"]),
    default="auto",
    show_default=True,
    help="How the bundle reaches the weights: hard links inside it, or only a note of where they are.",
)
@click.option(
    "--draft",
    "drafts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Directory of a drafter's checkpoint (DFlash or DSpark); may be given once for each.",
)
@click.option(
    "--last-tap",
    type=click.Choice(["raw", "normed"]),
    default="raw",
    show_default=True,
    help="What a drafter is fed of the last layer: the residual before or after the final norm.",
)
@click.option(
    "--mtp-hidden",
    type=click.Choice(["normed", "raw"]),
    default="normed",
    show_default=True,
    help="What the MTP module is fed: hidden states after or before the final norm.",
)
@click.option(
    "--mtp-norm",
    type=click.Choice(["rms", "layer"]),
    default="rms",
    show_default=True,
    help="The MTP module's final norm.",
)
@force_option
@json_option
def command(
    checkpoint: Path,
    out: Path,
    weights: Literal["auto", "link", "reference"],
    drafts: tuple[Path, ...],
    last_tap: Literal["raw", "normed"],
    mtp_hidden: Literal["normed", "raw"],
    mtp_norm: Literal["rms", "layer"],
    force: bool,
    as_json: bool,
) -> None:
    """Turn a Hugging Face CHECKPOINT directory into a model bundle.

    Every tensor is accounted for, the step graphs are built and checked, and no weight byte is copied. Public
    implementations disagree on the three choices of norms; their defaults are what most do.
    """
    from nemo_build.export.exporter import export_bundle
    from nemo_build.export.models import GraphOptions

    options = GraphOptions(last_tap=last_tap, mtp_hidden=mtp_hidden, mtp_norm=mtp_norm)
    result = export_bundle(checkpoint, out, weights=weights, force=force, drafts=drafts, options=options)
    ledger = result.ledger
    if as_json:
        print_json(
            {
                "out": str(out),
                "weights": result.weights,
                **_totals(ledger),
                "graphs": dict(result.graphs),
                "unused_files": list(result.unused),
                "drafters": {
                    kind: {**_totals(d.ledger), "unused_files": list(d.checkpoint.unused)}
                    for kind, d in result.drafters.items()
                },
            }
        )
        return
    graphs = ", ".join(f"{name} ({nodes} nodes)" for name, nodes in result.graphs.items())
    how = "hard links" if result.weights == "link" else "a reference"
    click.echo(f"{out}: {graphs}")
    click.echo(f"{_in_words(ledger)}; weights by {how}")
    for kind, drafter in result.drafters.items():
        click.echo(f"{kind}: {_in_words(drafter.ledger)}")
    unused = [*result.unused, *(f for d in result.drafters.values() for f in d.checkpoint.unused)]
    if unused:
        click.echo(f"left out, not part of the checkpoint: {', '.join(unused)}")


def _totals(ledger: Ledger) -> dict[str, Any]:
    return {
        "tensors": len(ledger.entries),
        "parameters": ledger.parameters,
        "bytes_by_dtype": ledger.bytes_by_dtype,
    }


def _in_words(ledger: Ledger) -> str:
    return f"{len(ledger.entries)} tensors, {count(ledger.parameters)} parameters, {size(ledger.nbytes)}"
