# SPDX-License-Identifier: Apache-2.0
"""Building of an engine for TensorRT: plans that hold code, and one file of weights that they share."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import onnx

from nemo_build.engines.build import WEIGHTS_FILE, BuildOptions, BuildProgress, Inputs, Written, size_settings
from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable
from nemo_build.engines.gpu.lowering import kernel_states, lower_kernels, weight_inputs
from nemo_build.engines.gpu.weights import ALIGNMENT, KernelWeights
from nemo_build.engines.plan import MemoryPlan
from nemo_build.engines.targets import Target, usable_bytes
from nemo_build.engines.tensorrt import LIBRARY
from nemo_build.engines.tensorrt.gpu import only, require_gpu
from nemo_build.engines.tensorrt.kernels import require_kernels
from nemo_build.engines.trt.builder import Job, profile_of
from nemo_build.engines.trt.compiling import (
    FOLDER,
    Lowered,
    choice_problems,
    compile_graph,
    log_of,
    lower_all,
    phase_settings,
    require_space,
    step_activations,
)
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.phases import Phase
from nemo_build.engines.weights import place, write_packed
from nemo_build.errors import UserError
from nemo_build.plugins.gpu.kernel import resolve
from nemo_build.settings import cache_directory
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec

WEIGHTS = ("auto",)
"""How an engine may hold projections: as they are stored, unquantized ones in the type of activations."""

ACTIVATIONS = ("auto", "bfloat16", "float32")
"""What projections may round their inputs to; ``auto`` is the checkpoint's own rounding, else bfloat16."""

OPTIMIZATION_LEVELS = range(6)
DEFAULT_LEVEL = 3  # the library's own

_NETWORK = "nemo_build.engines.tensorrt.network:PluginNetwork"
_PLAN_BYTES = 256 << 20  # room for one; it holds code and no weights
_ITEM = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}
_CACHES = ("key", "value")


class Compiling:
    """An engine for TensorRT; see :class:`~nemo_build.engines.build.Maker`."""

    def __init__(self, inputs: Inputs, target: Target, options: BuildOptions) -> None:
        assert target.sm is not None, "the backend is for GPUs"
        version = LIBRARY.require()
        self.settings = _settings(inputs.manifest, options)
        self._gpu, driver = require_gpu(target)
        self._inputs, self._target, self._sm = inputs, target, target.sm
        compute = FLOAT if self.settings["activations"] == "float32" else BFLOAT16
        rounds = self.settings["activations"] == "auto"
        self._weights = KernelWeights(inputs.tensors, compute=compute, rounds=rounds)
        self._kernels: dict[str, KernelTable] = {}
        self._graphs = self._lower()
        uses = {name: use for table in self._kernels.values() for name, use in table.uses.items()}
        require_kernels(uses.values(), target)
        self.backend: dict[str, Any] = {
            "name": LIBRARY.name,
            "version": version,
            "sms": [target.sm],
            "gpu": self._gpu.name,
            "cuda": driver.cuda,
            "kernels": [use.to_json() for _, use in sorted(uses.items())],
        }
        self._timings = (
            Path(options.timing_cache).absolute()
            if options.timing_cache
            else timing_cache(self._gpu.name, version)
        )
        self.plan = self._plan()

    def available(self, options: BuildOptions) -> tuple[int, str]:
        """The target's memory, less what it keeps free, unless asked otherwise."""
        if options.memory is None:
            return usable_bytes(self._target), f"{self._target.name} ({self._target.memory_gb:g} GB)"
        return options.memory, "the memory allowed"

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Compile the graphs and write the weights. Logs of failed ones stay beside `out`."""
        placed = place(self._weights.weights.values(), ALIGNMENT)
        total = sum(p.weight.nbytes for p in placed)
        require_space(out.parent, total + _PLAN_BYTES * len(self._graphs))
        (directory / FOLDER).mkdir()
        # First what may be refused, then what takes long.
        graphs = {g.name: self._compile(g, directory, out, progress) for g in self._graphs}
        shutil.rmtree(directory / FOLDER)
        report = progress.start("writing weights", total) if progress else None
        digest = write_packed(placed, self._inputs.folder, directory / WEIGHTS_FILE, report)
        return Written(graphs, {WEIGHTS_FILE: digest}, {p.weight.name: p.to_json() for p in placed})

    def _lower(self) -> list[Lowered]:
        """All graphs in all phases; each with a table of its kernels."""
        drafters = self._inputs.manifest["drafters"]
        if drafters:
            raise UserError(
                f"The TensorRT backend does not build drafters yet; the bundle has {', '.join(sorted(drafters))}.",
                hint="Export without --draft; the MTP module is built.",
            )

        def lower_one(model: onnx.ModelProto, phase: Phase) -> tuple[onnx.ModelProto, list[StateSpec]]:
            table = KernelTable()
            lowered = lower_kernels(model, phase, self._weights, table)
            self._kernels[lowered.graph.name] = table
            return lowered, kernel_states(model, phase, self._weights.compute)

        return lower_all(self._inputs, self.settings, lower_one)

    def _plan(self) -> MemoryPlan:
        """Graphs share weights, state and caches; intermediate results are an estimate, the manifest has what came."""
        spec = ModelSpec.from_json(self._inputs.manifest["spec"])
        slots, context = self.settings["max_sequences"], self.settings["max_context"]
        weights = sum(weight.nbytes for weight in self._weights.weights.values())
        states = {s.name: s for graph in self._graphs for s in graph.states}.values()
        state = sum(s.nbytes({"slots": slots}) for s in states if s.kind not in _CACHES)
        cache = sum(s.nbytes({"slots": slots}) for s in states if s.kind in _CACHES)
        logits = 4 * spec.vocab_size * max(graph.phase.logit_rows for graph in self._graphs)
        buffers = max(_kernel_buffers(g, self._kernels[g.model.graph.name]) for g in self._graphs)
        activations = step_activations(spec, self._graphs, slots, context) + buffers + logits
        return MemoryPlan(slots, context, weights, weights, state, cache, activations)

    def _compile(
        self, graph: Lowered, directory: Path, out: Path, progress: BuildProgress | None
    ) -> dict[str, Any]:
        """Compile one graph; returns what the manifest says of it."""
        table = self._kernels[graph.model.graph.name]
        job = Job(
            LIBRARY,
            directory / FOLDER / f"{graph.name}.onnx",
            directory / f"{graph.name}.engine",
            log_of(out, graph),
            (self._sm,),
            profile_of(graph.shapes(), graph.phase),
            network=_NETWORK,
            options={
                "kernels": table.to_json(),
                "sm": self._sm,
                "timing_cache": str(self._timings),
                "optimization_level": self.settings["optimization_level"],
            },
            environment=only(self._gpu),
        )
        report = progress.start(f"compiling {graph.name}", _PLAN_BYTES) if progress else None
        entry, built = compile_graph(graph, job)
        if report:
            report(
                _PLAN_BYTES
            )  # how large a plan becomes is not known before, nor is writing it what takes the time
        weights = weight_inputs(graph.model, self._weights)
        return {
            **entry,
            "inputs": [name for name in entry["inputs"] if name not in weights],
            "weights": weights,
            "kernels": sorted(table.uses),
            **built.facts,
        }


def timing_cache(gpu: str, version: str) -> Path:
    """Where timings of kernels are kept for a GPU by name, and a version of the library."""
    name = re.sub(r"\W+", "-", gpu).strip("-").lower()
    return cache_directory() / "timings" / f"{name}-tensorrt-{version}.cache"


def _settings(manifest: dict[str, Any], options: BuildOptions) -> dict[str, Any]:
    """The options with defaults filled in; what makes no sense is refused."""
    sizes, problems = size_settings(manifest, options)
    phases, wrong = phase_settings(options)
    problems += [*choice_problems(options, WEIGHTS, ACTIVATIONS), *wrong]
    if options.gpus != "target":
        problems.append(f"--gpus is {options.gpus}; a TensorRT engine is for the GPU that it is built on")
    level = DEFAULT_LEVEL if options.optimization_level is None else options.optimization_level
    if level not in OPTIMIZATION_LEVELS:
        last = OPTIMIZATION_LEVELS[-1]
        problems.append(f"--optimization-level is {level}; there are 0 to {last}")
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {
        **sizes,
        "weights": options.weights,
        "activations": options.activations,
        "phases": phases,
        "optimization_level": level,
    }


def _kernel_buffers(graph: Lowered, table: KernelTable) -> int:
    """Bytes of what the kernels of one op of the portable graph give to each other and to others, at most."""
    nodes = {node.name: node for node in table.nodes()}
    shapes: dict[str, tuple[int, ...]] = {}
    ops: dict[str, int] = {}
    known = {"batch": graph.phase.slots, "slots": graph.phase.slots, "steps": graph.phase.steps}
    for node in graph.model.graph.node:
        if node.domain != KERNEL_DOMAIN:
            continue
        kernel, sizes = nodes[node.op_type], dict(known)
        for name, tensor in zip(node.input, kernel.inputs, strict=True):
            found = zip(tensor.shape, shapes.get(name, ()), strict=False)
            sizes |= {dim: size for dim, size in found if isinstance(dim, str)}
        for name, tensor in zip(node.output, kernel.outputs, strict=True):
            shapes[name] = tuple(resolve(d, sizes) for d in tensor.shape)
            if tensor.alias is None:
                op = node.name.rpartition("/")[0]
                ops[op] = ops.get(op, 0) + _ITEM[tensor.dtype] * math.prod(shapes[name])
    return max(ops.values(), default=0)
