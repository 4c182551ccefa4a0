# SPDX-License-Identifier: Apache-2.0
"""Building of an engine for TensorRT-RTX: lowering, a file of weights for the compiler alone, one plan a graph."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from nemo_build.engines.build import (
    BuildOptions,
    BuildProgress,
    Inputs,
    Written,
    size_settings,
    tensorrt_problems,
)
from nemo_build.engines.plan import MemoryPlan
from nemo_build.engines.targets import RTX_SMS, Target, allowed_bytes
from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.engines.tensorrt_rtx.addresses import environment
from nemo_build.engines.tensorrt_rtx.plan_file import require_sms, summarize
from nemo_build.engines.trt.builder import Job, profile_of
from nemo_build.engines.trt.compiling import (
    FOLDER,
    Lowered,
    choice_problems,
    compile_graph,
    describe,
    log_of,
    lower_all,
    phase_settings,
    require_space,
    step_activations,
)
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.forms import WeightTable, forms
from nemo_build.engines.trt.lowering import lower, lowered_states
from nemo_build.engines.trt.phases import EXPERT_ROWS, PREFILL, Phase
from nemo_build.engines.weights import place, point_at, write_packed
from nemo_build.errors import UserError
from nemo_build.spec import ModelSpec
from nemo_build.state import CACHES, RECURRENT, StateSpec

GPUS = tuple(sorted(RTX_SMS))
"""What an engine for all GPUs is for, compute capability times ten."""

WEIGHTS = ("auto", "bf16", "int4", "nvfp4")
"""How an engine may hold unquantized projections; ``auto`` is bf16."""

ACTIVATIONS = ("auto", "bfloat16", "float32")
"""What projections may round their inputs to; ``auto`` is the checkpoint's own rounding, else bfloat16."""

_WEIGHTS_FILE = "weights.bin"


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
        return allowed_bytes(self._target, options.memory)

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Compile the graphs. Logs of failed ones stay beside `out`."""
        largest = max(sum(self._table.weights[n].nbytes for n in g.weights()) for g in self._graphs)
        require_space(out.parent, largest + self.plan.weights_file)
        folder = directory / FOLDER
        folder.mkdir()
        graphs = {g.name: self._compile(g, directory, out, progress) for g in self._graphs}
        shutil.rmtree(folder)
        files = {entry["file"]: entry["sha256"] for entry in graphs.values()}
        return Written(graphs, files, {name: describe(w) for name, w in self._table.weights.items()})

    def _lower(self, compute: int) -> list[Lowered]:
        """All graphs in all phases."""

        def lower_one(model: onnx.ModelProto, phase: Phase) -> tuple[onnx.ModelProto, list[StateSpec]]:
            return lower(model, phase, self._table, compute), lowered_states(model, phase, compute)

        return lower_all(self._inputs, self.settings, lower_one)

    def _plan(self) -> MemoryPlan:
        """Every plan has a copy of its weights; scratch memory is an estimate, the manifest has what came of it."""
        spec = ModelSpec.from_json(self._inputs.manifest["spec"])
        slots, context = self.settings["max_sequences"], self.settings["max_context"]
        sizes = {name: weight.nbytes for name, weight in self._table.weights.items()}
        weights = sum(sizes[name] for graph in self._graphs for name in graph.weights())
        states = {s.name: s for graph in self._graphs for s in graph.states}.values()
        # Read and written by one step, so a step has two of each.
        state = sum(2 * s.nbytes({"slots": slots}) for s in states if s.kind in RECURRENT)
        cache = sum(s.nbytes({"slots": slots}) for s in states if s.kind in CACHES)
        buffers = 0
        if spec.moe and any(graph.phase.name == PREFILL for graph in self._graphs):
            width = spec.moe.latent_size or spec.hidden_size
            buffers = 4 * spec.moe.num_experts * EXPERT_ROWS * 2 * (width + spec.moe.intermediate_size)
        activations = step_activations(spec, self._graphs, slots, context) + buffers
        return MemoryPlan(slots, context, weights, weights, state, cache, activations)

    def _compile(
        self,
        graph: Lowered,
        directory: Path,
        out: Path,
        progress: BuildProgress | None,
    ) -> dict[str, Any]:
        """Write the weights of one graph and compile it; returns what the manifest says of it."""
        folder, plan = directory / FOLDER, directory / f"{graph.name}.engine"
        placed = place(self._table.weights[name] for name in graph.weights())
        total = sum(p.weight.nbytes for p in placed)
        report = progress.start(f"writing weights of {graph.name}", total) if progress else None
        write_packed(placed, self._inputs.folder, folder / _WEIGHTS_FILE, report)
        point_at(graph.model, placed, _WEIGHTS_FILE)
        profile = profile_of(graph.shapes(), graph.phase)
        job = Job(
            LIBRARY,
            folder / f"{graph.name}.onnx",
            plan,
            log_of(out, graph),
            self._sms,
            profile,
            environment=environment(),
        )
        report = progress.start(f"compiling {graph.name}", total) if progress else None
        entry, _ = compile_graph(graph, job, report)
        require_sms(plan, self._sms)
        return {**entry, "scratch": summarize(plan).scratch}


def _settings(manifest: dict[str, Any], options: BuildOptions, sms: Sequence[int]) -> dict[str, Any]:
    """The options with defaults filled in; what makes no sense is refused."""
    sizes, problems = size_settings(manifest, options)
    phases, wrong = phase_settings(options)
    problems += [*choice_problems(options, WEIGHTS, ACTIVATIONS), *wrong, *tensorrt_problems(options)]
    if options.weights in forms() and min(sms) < forms()[options.weights].MIN_SM:
        old = ", ".join(f"SM {sm}" for sm in sms if sm < forms()[options.weights].MIN_SM)
        problems.append(f"--weights {options.weights} needs a type that {old} lacks; int4 is to be had")
    if options.gpus not in ("target", "all"):
        problems.append(f"--gpus is {options.gpus}; there are target, all")
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {
        **sizes,
        "weights": options.weights,
        "activations": options.activations,
        "phases": phases,
        "gpus": options.gpus,
    }
