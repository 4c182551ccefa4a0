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
        "bytes of a thread that did not fit into registers. Kernels in bold may run for every decoded token and "
        "must fit. Columns are compute capabilities times ten; PTX is written for the oldest version that has what is "
        f"needed ({versions}; newer for a kernel that needs more).\n"
    )
    head += f"\n{_verification()}"
    by_op: dict[str, list[dict[str, Any]]] = {}
    for kernel in record["kernels"]:
        by_op.setdefault(kernel["op"], []).append(kernel)
    return "\n".join(
        [head, *(_table(op, kernels, list(record["ptx_versions"])) for op, kernels in by_op.items())]
    )


def _verification() -> str:
    """Which kernels give a token the same result in a launch of any size, and how many experts each way reads."""
    experts, chosen = 128, 6
    rows = [
        f"| {n} | {experts * (1 - (1 - chosen / experts) ** n):.0f} | {chosen * n} |"
        for n in (1, 2, 4, 8, 16, 64)
    ]
    return (
        "## Decoding and verifying\n\n"
        "A graph that decodes also verifies drafts, and what verification accepts must be what decoding would have "
        "given. So it has launches whose result for a token does not depend, to the bit, on how many tokens are in "
        "them, nor on where among them the token is:\n\n"
        "- `BlockLinear`: `vector_T`, `tile_T`, `codes_T` and `round`, each by itself. Two of them add up in "
        "different orders, so one graph has one of them for all its steps.\n"
        "- `RoutedExperts`: `round_up`, `step_up`, `round_down`, `step_down`; and `route`, `up_T`, `down_T`, "
        "`combine` for each T, and `up_codes_T`, `down_codes_T`, each by itself.\n"
        "- `CausalConv1d`: `step`. `SelectiveScan`: `step` and `keep`; a committed draft leaves the state that "
        "decoding it would have left.\n\n"
        "Tests in the interpreter compare this: projections and experts in launches of 1 to 64 tokens, the other two "
        "ops after every number of accepted tokens. Left out are kernels whose operands are codes of NVFP4, whose "
        "products have no order of their own there. That tensor cores treat the columns of an operand alike is taken "
        "for granted (`tile_T`, `codes_T`, `up_T`, `down_T` and theirs).\n\n"
        "What it costs is counted here in bytes of weights, not measured. A projection is read from memory once for "
        "any number of tokens, by programs that run side by side, and from the cache once for T of them. Of experts, "
        "memory must be read for those that are chosen at all. Steps read an expert once for each of its pairs of "
        "token and choice, from memory or, where another pair has just read it, from the cache; tiles read it once "
        f"for T pairs, and take two launches more. With {chosen} of {experts} experts a token, chosen "
        "independently:\n\n"
        "| tokens | experts chosen | pairs |\n|---|---|---|\n" + "\n".join(rows) + "\n"
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
