# SPDX-License-Identifier: Apache-2.0
"""docs/kernels.md, from what scripts/bench/kernels.py wrote."""

from __future__ import annotations

from typing import Any


def kernels_page(record: dict[str, Any]) -> str:
    """What every GPU kernel takes on every architecture, a table for each op."""
    versions = ", ".join(f"{sm}: {v / 10:.1f}" for sm, v in record["ptx_versions"].items())
    head = (
        "# GPU kernels\n\nThe ops' kernels in the Triton language (`plugins/*/gpu.py`), compiled by "
        f"`{record['command']}` with Triton {record['triton']} at the widths of the 30B release. They were compiled, "
        "and checked against the references in Triton's interpreter; **they were not run on a device**, and nothing "
        "here says how fast they are.\n\n"
        "A cell has the registers of a thread, KiB of shared memory of a program and KiB of machine code; `+` the "
        "bytes of a thread that did not fit into registers. Kernels in bold run for every decoded token and must fit. "
        "Columns are compute capabilities times ten; PTX is written for the oldest version that has what is needed "
        f"({versions}; newer for a kernel that needs more).\n"
    )
    by_op: dict[str, list[dict[str, Any]]] = {}
    for kernel in record["kernels"]:
        by_op.setdefault(kernel["op"], []).append(kernel)
    return "\n".join(
        [head, *(_table(op, kernels, list(record["ptx_versions"])) for op, kernels in by_op.items())]
    )


def _table(op: str, kernels: list[dict[str, Any]], architectures: list[str]) -> str:
    rows = [
        f"| kernel | types | threads | {' | '.join(architectures)} |",
        "|---" * (len(architectures) + 3) + "|",
    ]
    for kernel in kernels:
        name = f"**{kernel['name']}**" if kernel["per_token"] else kernel["name"]
        cells = [name, ", ".join(kernel["types"].values()), str(kernel["threads"])]
        cells += [_cell(kernel["architectures"].get(sm)) for sm in architectures]
        rows.append(f"| {' | '.join(cells)} |")
    return f"## {op}\n\n" + "\n".join(rows) + "\n"


def _cell(figures: dict[str, int] | None) -> str:
    if figures is None:
        return ""
    spilled = f" +{figures['stack']}" if figures["stack"] else ""
    return f"{figures['registers']} / {figures['shared'] / 1024:.1f} / {figures['cubin'] / 1024:.0f}{spilled}"
