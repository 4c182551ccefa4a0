# SPDX-License-Identifier: Apache-2.0
"""docs/support.md, from the table of targets and what is known of each backend."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_build.engines.targets import (
    TARGETS,
    Target,
    activation_formats,
    backends_of,
    headroom,
    speculators,
    weight_formats,
)


@dataclass(frozen=True)
class Evidence:
    """How far a backend's engines are known to work, in words; "no" where not at all."""

    built: str
    simulated: str
    run: str


EVIDENCE = {
    "onnxruntime": Evidence(
        "yes, by the tests",
        "not needed",
        "yes: every kernel and whole models, on x86-64 Linux ([benchmarks.md](benchmarks.md)); other processors get "
        "plain C++ kernels, untried",
    ),
    "tensorrt-rtx": Evidence(
        "yes, on a machine without a GPU: the library accepts the graphs and writes plans",
        "the graphs as they are lowered for it, in ONNX Runtime on a CPU, against the portable graphs",
        "no",
    ),
    "tensorrt": Evidence(
        "no: TensorRT was not at hand. Networks were built around stand-ins for the kernels by TensorRT-RTX, whose "
        "Python interface is the same",
        "the graphs, which are those of onnxruntime-cuda; kernels as plugins, driven through the vendor's package",
        "no",
    ),
    "onnxruntime-cuda": Evidence(
        "yes, on a machine without a GPU; ONNX Runtime's CUDA provider takes the graphs, on CUDA libraries that do "
        "nothing",
        "the engine's graphs in ONNX Runtime on a CPU with the kernels in Triton's interpreter, against the portable "
        "graphs",
        "no",
    ),
}
NOTHING = Evidence("no", "no", "no")

INTRODUCTION = """\
# Support

What of each target is built, simulated or run. **Built**: the compiler accepted the graphs and wrote an engine.
**Simulated**: what the engine computes was computed on a CPU and compared with the portable graph. **Run**: the engine
itself ran on such a device. No engine was run or measured on a GPU; for GPUs `nemo-build build --plan` gives memory and
a bound from bandwidth, both computed.
"""


def support_page(note: str) -> str:
    """The page; `note` is its first line."""
    return "\n".join([note, INTRODUCTION, _evidence(), _table(), _rules(), _sources()])


def _evidence() -> str:
    rows = ["| backend | targets | built | simulated | run |", "|---|---|---|---|---|"]
    served: dict[str, list[str]] = {}
    for target in TARGETS.values():
        names = [rule.name for rule in backends_of(target) if not rule.refusal] or [""]
        for name in names:
            served.setdefault(name, []).append(f"`{target.name}`")
    for name, targets in served.items():
        e = EVIDENCE[name] if name else NOTHING
        rows.append(f"| {name or 'none yet'} | {', '.join(targets)} | {e.built} | {e.simulated} | {e.run} |")
    rows.append(
        "\nOf a target with several, the first in this table builds, or the one that `--backend` names.\n"
    )
    refusals = {rule.name: rule.refusal for t in TARGETS.values() for rule in backends_of(t) if rule.refusal}
    if refusals:
        rows.append("Not in this version:\n")
        rows += [f"- {name}: {refusal}." for name, refusal in sorted(refusals.items())] + [""]
    return "\n".join(["## Backends\n", *rows])


def _table() -> str:
    rows = [
        "## Targets\n",
        "| target | product | SM | memory | bandwidth | FP8 | FP4 | weight formats | activations | drafts | plans |",
        "|---" * 11 + "|",
        *(_row(t) for t in TARGETS.values()),
        "",
        "Weight formats: those it computes with as they are, smallest first; on GPUs, those of compilers: the kernels "
        "that engines of TensorRT and ONNX Runtime CUDA carry take NVFP4 and FP8 as stored on every SM. Drafts: "
        "speculators for few sequences at a time with their draft lengths, best first. Plans: the share of memory they "
        "may take.\n",
    ]
    return "\n".join(rows)


def _row(t: Target) -> str:
    drafts = ", ".join(s.name if s.drafts is None else f"{s.name} {s.drafts}" for s in speculators(t))
    cells = [
        f"`{t.name}`",
        t.product,
        "" if t.sm is None else str(t.sm),
        "the machine's" if t.memory_gb is None else f"{t.memory_gb:g} GB",
        "the machine's" if t.bandwidth_gbs is None else f"{t.bandwidth_gbs:g} GB/s",
        "yes" if t.fp8 else "no",
        "yes" if t.fp4 else "no",
        ", ".join(weight_formats(t)),
        ", ".join(activation_formats(t)),
        drafts,
        f"{1 - headroom(t):.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _rules() -> str:
    return (
        "All but products, memory and bandwidth follows from rules in `engines/targets.py`, whose text has the "
        "reasons; `nemo-build targets --json` prints what they give.\n"
    )


def _sources() -> str:
    lines = [f"- `{t.name}`: {t.source}{f' ({t.note})' if t.note else ''}" for t in TARGETS.values()]
    return "\n".join(["## Sources of memory and bandwidth\n", *lines, ""])
