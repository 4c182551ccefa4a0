# SPDX-License-Identifier: Apache-2.0
"""What the makers of engines for TensorRT-RTX and TensorRT share: graphs of all phases, and one plan a graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from nemo_build.bundle import Progress, sha256_file
from nemo_build.engines.build import BuildOptions, Inputs
from nemo_build.engines.plan import plan_memory
from nemo_build.engines.trt.builder import Built, Job, build_plan
from nemo_build.engines.trt.phases import DECODE, PREFILL, Phase, phases_of
from nemo_build.engines.weights import Weight, external_entries
from nemo_build.errors import UserError
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec

FOLDER = ".lowered"
"""Where in an engine's directory the compiler's input lies while it is built."""


@dataclass(frozen=True)
class Lowered:
    """One graph of an engine: its name, what it was made from, its phase, the model, and its state buffers."""

    name: str
    source: str
    phase: Phase
    model: onnx.ModelProto
    states: list[StateSpec]

    def weights(self) -> list[str]:
        """Names of the weights that are its external initializers."""
        return [t.name for t in self.model.graph.initializer if external_entries(t)]

    def shapes(self) -> dict[str, list[int | str]]:
        """Shape of each input; dimensions that vary are strings."""
        return {
            i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
            for i in self.model.graph.input
        }

    def describe(self) -> dict[str, Any]:
        """What the manifest says of it, its file apart."""
        phase = self.phase
        return {
            "graph": self.source,
            "phase": phase.name,
            "inputs": list(self.shapes()),
            "outputs": [o.name for o in self.model.graph.output],
            "state": [s.to_json() for s in self.states],
            "steps": phase.steps,
            "logit_rows": phase.logit_rows,
            "pending": phase.pending,
            "cache_rows": phase.cache_rows,
        }


def lower_all(
    inputs: Inputs,
    settings: dict[str, Any],
    lower: Callable[[onnx.ModelProto, Phase], tuple[onnx.ModelProto, list[StateSpec]]],
) -> list[Lowered]:
    """All graphs in the phases that the settings name; `lower` gives a lowered model and its state buffers."""
    phases = phases_of(
        settings["max_sequences"], settings["max_context"], tuple(settings["phases"].split(","))
    )
    return [
        Lowered(f"{name}.{phase.name}", name, phase, *lower(model, phase))
        for name, model in inputs.models.items()
        for phase in phases
        if phase.name == DECODE or name not in _short_graphs(inputs.manifest)
    ]


def _short_graphs(manifest: Mapping[str, Any]) -> set[str]:
    """Graphs that no prompt goes through: those of drafters but for the ones that extend contexts."""
    drafters = manifest["drafters"].items()
    return {name for kind, d in drafters for name in d["graphs"] if name != f"{kind}_context"}


def phase_settings(options: BuildOptions) -> tuple[str, list[str]]:
    """The phases in their order, with a comma between them, and what makes no sense of those asked for."""
    phases = [name.strip() for name in options.phases.split(",")]
    problems = []
    if DECODE not in phases or not set(phases) <= {DECODE, PREFILL} or len(set(phases)) < len(phases):
        problems.append(f"--phases is {options.phases}; there are {DECODE} and {DECODE},{PREFILL}")
    return ",".join(name for name in (DECODE, PREFILL) if name in phases), problems


def choice_problems(
    options: BuildOptions, weights: tuple[str, ...], activations: tuple[str, ...]
) -> list[str]:
    """What is asked for of weights and activations, and is not among what there is."""
    asked = (("weights", options.weights, weights), ("activations", options.activations, activations))
    return [
        f"--{name} is {value}; for this target there are {', '.join(known)}"
        for name, value, known in asked
        if value not in known
    ]


def step_activations(spec: ModelSpec, graphs: Sequence[Lowered], slots: int, context: int) -> int:
    """An estimate of the bytes of the largest step's intermediate results, experts' buffers apart."""
    tokens = max(slots * graph.phase.steps for graph in graphs)
    wide = plan_memory(
        spec,
        [],
        slots=slots,
        context=context,
        weights_file=0,
        weights_memory=0,
        native=True,
        step_tokens=tokens,
    ).activations
    # Attention over several queries a row gets the keys and values of one layer for every query head.
    heads = spec.attention.num_heads * spec.attention.head_dim if spec.attention else 0
    return wide + 2 * 2 * slots * heads * graphs[0].phase.cache_rows


def compile_graph(graph: Lowered, job: Job, progress: Progress | None = None) -> tuple[dict[str, Any], Built]:
    """Write a graph where the job says, and build it; returns what the manifest says of it, and what the build told."""
    job.model.write_bytes(graph.model.SerializeToString(deterministic=True))
    built = build_plan(job, progress)
    return {"file": job.out.name, "sha256": sha256_file(job.out), **graph.describe()}, built


def log_of(out: Path, graph: Lowered) -> Path:
    """Where the compiler's messages about a graph go: beside the engine, which may not come to be."""
    return out.parent / f"{out.name}.{graph.name}.log"


def require_space(where: Path, nbytes: int) -> None:
    """Raise UserError if the file system has no room for what a build writes."""
    free = shutil.disk_usage(where).free
    if free < nbytes:
        raise UserError(
            f"{where} has no room for the build: it takes {nbytes / 1e9:.1f} GB for a while, "
            f"{free / 1e9:.1f} GB are free."
        )


def describe(weight: Weight) -> dict[str, Any]:
    """What the manifest says of a weight whose place is the compiler's affair."""
    return {**weight.describe(), "nbytes": weight.nbytes}
