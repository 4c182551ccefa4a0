# SPDX-License-Identifier: Apache-2.0
"""Building of an engine for TensorRT-RTX: lowering, a file of weights for the compiler alone, one plan a graph."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from nemo_build.bundle import sha256_file
from nemo_build.engines.build import BuildOptions, BuildProgress, Inputs, Written, size_settings
from nemo_build.engines.plan import MemoryPlan, plan_memory
from nemo_build.engines.targets import RTX_SMS, Target, usable_bytes
from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.engines.tensorrt_rtx.plan_file import require_sms, summarize
from nemo_build.engines.trt.builder import Job, build_plan, profile_of
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.forms import WeightTable, forms
from nemo_build.engines.trt.lowering import lower, lowered_states
from nemo_build.engines.trt.phases import DECODE, EXPERT_ROWS, PREFILL, Phase, phases_of
from nemo_build.engines.weights import PlacedWeight, Weight, external_entries, place, point_at, write_packed
from nemo_build.errors import UserError
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec

GPUS = tuple(sorted(RTX_SMS))
"""What an engine for all GPUs is for, compute capability times ten."""

WEIGHTS = ("auto", "bf16", "int4", "nvfp4")
"""How an engine may hold unquantized projections; ``auto`` is bf16."""

ACTIVATIONS = ("auto", "bfloat16", "float32")
"""What projections may round their inputs to; ``auto`` is the checkpoint's own rounding, else bfloat16."""

_FOLDER = ".lowered"
_WEIGHTS_FILE = "weights.bin"
_DOUBLED = ("conv", "ssm", "ssm_pending")  # read and written by one step, so a step has two of each


@dataclass(frozen=True)
class _Lowered:
    """One graph of the engine: its name, what it was made from, and the model."""

    name: str
    source: str
    phase: Phase
    model: onnx.ModelProto
    states: list[StateSpec]

    def weights(self) -> list[str]:
        """Names of the weights in it."""
        return [t.name for t in self.model.graph.initializer if external_entries(t)]


class Compiling:
    """An engine for TensorRT-RTX; see :class:`~nemo_build.engines.build.Maker`."""

    def __init__(self, inputs: Inputs, target: Target, options: BuildOptions) -> None:
        LIBRARY.require()
        assert target.sm is not None, "the backend is for GPUs"
        self._inputs, self._target = inputs, target
        self._sms = GPUS if options.gpus == "all" else (target.sm,)
        self.settings = _settings(inputs.manifest, options, self._sms)
        self.backend: dict[str, Any] = {
            "name": LIBRARY.name,
            "version": LIBRARY.version,
            "sms": list(self._sms),
        }
        compute = FLOAT if self.settings["activations"] == "float32" else BFLOAT16
        kind = self.settings["weights"]
        self._table = WeightTable(
            inputs.tensors,
            self._sms,
            convert=None if kind in ("auto", "bf16") else kind,
            compute=compute,
            rounds=self.settings["activations"] == "auto",
        )
        self._graphs = self._lower(compute)
        self.plan = self._plan()

    def available(self, options: BuildOptions) -> tuple[int, str]:
        """The target's memory, less what it keeps free, unless asked otherwise."""
        if options.memory is None:
            return usable_bytes(self._target), f"{self._target.name} ({self._target.memory_gb:g} GB)"
        return options.memory, "the memory allowed"

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Compile the graphs. Logs of failed ones stay beside `out`."""
        placed = place(self._table.weights.values())
        total = sum(p.weight.nbytes for p in placed)
        _require_space(out.parent, total, self.plan.weights_file)
        folder = directory / _FOLDER
        folder.mkdir()
        report = progress.start("writing weights", total) if progress else None
        write_packed(placed, self._inputs.folder, folder / _WEIGHTS_FILE, report)
        graphs = {g.name: self._compile(g, placed, directory, out, progress) for g in self._graphs}
        shutil.rmtree(folder)
        files = {entry["file"]: entry["sha256"] for entry in graphs.values()}
        return Written(graphs, files, {p.weight.name: _describe(p.weight) for p in placed})

    def _lower(self, compute: int) -> list[_Lowered]:
        """All graphs in all phases."""
        drafters = self._inputs.manifest["drafters"]
        if drafters:
            raise UserError(
                "The TensorRT-RTX backend does not build drafters yet; the bundle has "
                f"{', '.join(sorted(drafters))}.",
                hint="Export without --draft; the MTP module is built.",
            )
        names = tuple(self.settings["phases"].split(","))
        phases = phases_of(self.settings["max_sequences"], self.settings["max_context"], names)
        return [
            _Lowered(
                f"{name}.{phase.name}",
                name,
                phase,
                lower(model, phase, self._table, compute),
                lowered_states(model, phase, compute),
            )
            for name, model in self._inputs.models.items()
            for phase in phases
        ]

    def _plan(self) -> MemoryPlan:
        """Every plan has a copy of its weights; scratch memory is an estimate, the manifest has what came of it."""
        spec = ModelSpec.from_json(self._inputs.manifest["spec"])
        slots, context = self.settings["max_sequences"], self.settings["max_context"]
        sizes = {name: weight.nbytes for name, weight in self._table.weights.items()}
        weights = sum(sizes[name] for graph in self._graphs for name in graph.weights())
        states = {s.name: s for graph in self._graphs for s in graph.states}.values()
        state = sum(2 * s.nbytes({"slots": slots}) for s in states if s.kind in _DOUBLED)
        cache = sum(s.nbytes({"slots": slots}) for s in states if s.kind not in _DOUBLED)
        tokens = max(slots * graph.phase.steps for graph in self._graphs)
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
        buffers = 0
        if spec.moe and any(graph.phase.name == PREFILL for graph in self._graphs):
            width = spec.moe.latent_size or spec.hidden_size
            buffers = 4 * spec.moe.num_experts * EXPERT_ROWS * 2 * (width + spec.moe.intermediate_size)
        # Attention over several queries a row gets the keys and values of one layer for every query head.
        heads = spec.attention.num_heads * spec.attention.head_dim if spec.attention else 0
        expanded = 2 * 2 * slots * heads * self._graphs[0].phase.cache_rows
        return MemoryPlan(slots, context, weights, weights, state, cache, wide + buffers + expanded)

    def _compile(
        self,
        graph: _Lowered,
        placed: Sequence[PlacedWeight],
        directory: Path,
        out: Path,
        progress: BuildProgress | None,
    ) -> dict[str, Any]:
        """Compile one graph; returns what the manifest says of it."""
        path = directory / _FOLDER / f"{graph.name}.onnx"
        point_at(graph.model, placed, _WEIGHTS_FILE)
        path.write_bytes(graph.model.SerializeToString(deterministic=True))
        shapes = {
            i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
            for i in graph.model.graph.input
        }
        plan = directory / f"{graph.name}.engine"
        log = out.parent / f"{out.name}.{graph.name}.log"
        job = Job(LIBRARY, path, plan, log, self._sms, profile_of(shapes, graph.phase))
        sizes = {p.weight.name: p.weight.nbytes for p in placed}
        total = sum(sizes[name] for name in graph.weights())
        build_plan(job, progress.start(f"compiling {graph.name}", total) if progress else None)
        require_sms(plan, self._sms)
        phase, summary = graph.phase, summarize(plan)
        return {
            "file": plan.name,
            "sha256": sha256_file(plan),
            "graph": graph.source,
            "phase": phase.name,
            "inputs": list(shapes),
            "outputs": [o.name for o in graph.model.graph.output],
            "state": [s.to_json() for s in graph.states],
            "steps": phase.steps,
            "logit_rows": phase.logit_rows,
            "pending": phase.pending,
            "cache_rows": phase.cache_rows,
            "scratch": summary.scratch,
        }


def _settings(manifest: dict[str, Any], options: BuildOptions, sms: Sequence[int]) -> dict[str, Any]:
    """The options with defaults filled in; what makes no sense is refused."""
    sizes, problems = size_settings(manifest, options)
    phases = [name.strip() for name in options.phases.split(",")]
    if options.weights not in WEIGHTS:
        problems.append(f"--weights is {options.weights}; for this target there are {', '.join(WEIGHTS)}")
    elif options.weights in forms() and min(sms) < forms()[options.weights].MIN_SM:
        old = ", ".join(f"SM {sm}" for sm in sms if sm < forms()[options.weights].MIN_SM)
        problems.append(f"--weights {options.weights} needs a type that {old} lacks; int4 is to be had")
    if options.activations not in ACTIVATIONS:
        problems.append(
            f"--activations is {options.activations}; for this target there are {', '.join(ACTIVATIONS)}"
        )
    if DECODE not in phases or not set(phases) <= {DECODE, PREFILL} or len(set(phases)) < len(phases):
        problems.append(f"--phases is {options.phases}; there are {DECODE} and {DECODE},{PREFILL}")
    if options.gpus not in ("target", "all"):
        problems.append(f"--gpus is {options.gpus}; there are target, all")
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {
        **sizes,
        "weights": options.weights,
        "activations": options.activations,
        "phases": ",".join(name for name in (DECODE, PREFILL) if name in phases),
        "gpus": options.gpus,
    }


def _require_space(where: Path, lowered: int, plans: int) -> None:
    """Raise UserError if the file system has no room for the compiler's input and output."""
    free = shutil.disk_usage(where).free
    if free < lowered + plans:
        raise UserError(
            f"{where} has no room for the build: it takes {(lowered + plans) / 1e9:.1f} GB for a while, "
            f"{free / 1e9:.1f} GB are free."
        )


def _describe(weight: Weight) -> dict[str, Any]:
    """What the manifest says of a weight; where it is in the plans is the compiler's affair."""
    return {**weight.describe(), "nbytes": weight.nbytes}
