# SPDX-License-Identifier: Apache-2.0
"""``nemo-build inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nemo_build.cli._console import bars, count, json_option, key_values, print_json, size, table


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read an engine's weights whole and compare their digest.")
@json_option
def command(path: Path, verify: bool, as_json: bool) -> None:
    """Show what a checkpoint, a model bundle or an engine at PATH holds, and which devices it fits."""
    from nemo_build.engines.inspect import inspect, verify_weights

    report = inspect(path)
    if verify:
        with bars() as progress:
            verify_weights(path, progress.start("reading weights", report.weight_bytes))
        click.echo("the weights are what was built", err=True)
    if as_json:
        print_json(report.to_json())
        return
    layers = ", ".join(f"{n} {kind}" for kind, n in report.layers.items())
    dtypes = ", ".join(f"{dtype} {size(n)}" for dtype, n in report.bytes_by_dtype.items())
    key_values(
        {
            "kind": report.kind,
            "architecture": report.architecture,
            "layers": f"{sum(report.layers.values())}: {layers}",
            "pattern": report.pattern,
            "width": f"hidden {report.hidden_size}, vocabulary {report.vocab_size}",
            "context": f"{report.max_positions:,} positions",
            "parameters": f"{count(report.parameters)}, {count(report.parameters_active)} active per token, "
            f"{count(report.parameters_mtp)} in the MTP module",
            "weights": f"{report.tensors} tensors, {size(report.weight_bytes)}: {dtypes}",
            "state": f"{size(report.state_per_sequence)} per sequence (float32), "
            f"cache {size(report.cache_per_token)} per token (bfloat16, as on GPUs)",
        }
    )
    if report.engine is not None:
        plan = report.engine["plan"]
        backend = report.engine["backend"]
        key_values(
            {
                "target": f"{report.engine['target']} ({backend['name']} {backend['version']})",
                "weights": report.engine["options"]["weights"],
                "activations": f"{report.engine['options']['activations']}, sums in float32",
                "sizes": f"{plan['slots']} sequences of {plan['context']} positions",
                "memory": f"{size(plan['total'])}: weights {size(plan['weights_memory'])}, "
                f"state {size(plan['state'])}, cache {size(plan['cache'])}, "
                f"activations {size(plan['activations'])}",
                "made with": "; ".join(report.engine["mismatches"]) or "what is here",
            }
        )
        for name, compiled in report.engine["compiled"].items():
            click.echo(f"\n{name}: {_compiled(compiled)}")
    click.echo()
    rows = [(f.target, f"{f.memory_gb:g} GB", *_fit_cells(f.context, f.sequences)) for f in report.fits]
    table("With the weights as they are", rows, ("target", "memory", "longest context", "sequences at 8K"))


def _compiled(summary: dict[str, Any]) -> str:
    """What a compiled graph holds, in a few words."""
    header = summary["header"]
    constants = ", ".join(f"{dtype} {size(n)}" for dtype, n in summary["constants"].items())
    return (
        f"{size(header['nbytes'])} for SM {', '.join(map(str, header['sms']))}; constants {constants}; "
        f"scratch {size(summary['scratch'])}; {summary['kernels']} kernels, {summary['products']} products"
    )


def _fit_cells(context: int, sequences: int) -> tuple[str, str]:
    return ("does not fit", "") if not context else (f"{context:,}", f"{sequences:,}" if sequences else "any")
