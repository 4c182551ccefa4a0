# SPDX-License-Identifier: Apache-2.0
"""``nemo-build export``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from nemo_build.cli._console import count, force_option, json_option, print_json, size


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
@force_option
@json_option
def command(
    checkpoint: Path, out: Path, weights: Literal["auto", "link", "reference"], force: bool, as_json: bool
) -> None:
    """Turn a Hugging Face CHECKPOINT directory into a model bundle.

    Every tensor is accounted for, the step graphs are built and checked, and no weight byte is copied.
    """
    from nemo_build.export.exporter import export_bundle

    result = export_bundle(checkpoint, out, weights=weights, force=force)
    ledger = result.ledger
    if as_json:
        print_json(
            {
                "out": str(out),
                "weights": result.weights,
                "tensors": len(ledger.entries),
                "parameters": ledger.parameters,
                "bytes_by_dtype": ledger.bytes_by_dtype,
                "graphs": dict(result.graphs),
                "unused_files": list(result.unused),
            }
        )
        return
    graphs = ", ".join(f"{name} ({nodes} nodes)" for name, nodes in result.graphs.items())
    how = "hard links" if result.weights == "link" else "a reference"
    click.echo(f"{out}: {graphs}")
    click.echo(
        f"{len(ledger.entries)} tensors, {count(ledger.parameters)} parameters, {size(ledger.nbytes)}; "
        f"weights by {how}"
    )
    if result.unused:
        click.echo(f"left out, not part of the checkpoint: {', '.join(result.unused)}")
