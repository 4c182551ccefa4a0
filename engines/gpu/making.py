# SPDX-License-Identifier: Apache-2.0
"""What makers of engines with kernels of our own share: lowered graphs, their weights and kernels, and the plan."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from nemo_build.engines.build import WEIGHTS_FILE, BuildOptions, BuildProgress, Inputs, size_settings
from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable
from nemo_build.engines.gpu.lowering import kernel_states, lower_kernels, weight_inputs
from nemo_build.engines.gpu.weights import ALIGNMENT, KernelWeights
from nemo_build.engines.plan import MemoryPlan
from nemo_build.engines.trt.compiling import (
    Lowered,
    choice_problems,
    lower_all,
    phase_settings,
    step_activations,
)
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.phases import Phase
from nemo_build.engines.weights import PlacedWeight, place, write_packed
from nemo_build.plugins.gpu.kernel import resolve
from nemo_build.spec import ModelSpec
from nemo_build.state import CACHES, RECURRENT, StateSpec

WEIGHTS = ("auto",)
"""How an engine may hold projections: as they are stored, unquantized ones in the type of activations."""

ACTIVATIONS = ("auto", "bfloat16", "float32")
"""What projections may round their inputs to; ``auto`` is the checkpoint's own rounding, else bfloat16."""

_ITEM = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}


def kernel_settings(manifest: dict[str, Any], options: BuildOptions) -> tuple[dict[str, Any], list[str]]:
    """The options with defaults filled in, and what makes no sense of them."""
    sizes, problems = size_settings(manifest, options)
    phases, wrong = phase_settings(options)
    problems += [*choice_problems(options, WEIGHTS, ACTIVATIONS), *wrong]
    settings = {**sizes, "weights": options.weights, "activations": options.activations, "phases": phases}
    return settings, problems


class KernelGraphs:
    """The graphs of an engine in all phases.

    Args:
        inputs: What the build reads.
        settings: Of :func:`kernel_settings`.

    Attributes:
        weights: The weights that the graphs take as inputs; all share them.
        tables: The kernels of each graph, by its name.
        graphs: The lowered graphs.

    Raises:
        UserError: There are no kernels for what the model does.
    """

    def __init__(self, inputs: Inputs, settings: dict[str, Any]) -> None:
        self._spec = ModelSpec.from_json(inputs.manifest["spec"])
        self._settings, self._folder = settings, inputs.folder
        compute = FLOAT if settings["activations"] == "float32" else BFLOAT16
        rounds = settings["activations"] == "auto"
        self.weights = KernelWeights(inputs.tensors, compute=compute, rounds=rounds)
        tables: list[KernelTable] = []

        def lower_one(model: onnx.ModelProto, phase: Phase) -> tuple[onnx.ModelProto, list[StateSpec]]:
            tables.append(KernelTable())
            lowered = lower_kernels(model, phase, self.weights, tables[-1])
            return lowered, kernel_states(model, phase, compute)

        self.graphs = lower_all(inputs, settings, lower_one)
        self.tables = {graph.name: table for graph, table in zip(self.graphs, tables, strict=True)}

    @cached_property
    def _placed(self) -> list[PlacedWeight]:
        return place(self.weights.weights.values(), ALIGNMENT)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(p.weight.nbytes for p in self._placed)

    def write_weights(
        self, directory: Path, progress: BuildProgress | None
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Write the file that holds the weights.

        Args:
            directory: Where it is to be.
            progress: Told of it.

        Returns:
            The file's digest by its name, and what the manifest says of each weight.
        """
        report = progress.start("writing weights", self.weight_bytes) if progress else None
        digest = write_packed(self._placed, self._folder, directory / WEIGHTS_FILE, report)
        return {WEIGHTS_FILE: digest}, {p.weight.name: p.to_json() for p in self._placed}

    def plan(self) -> MemoryPlan:
        """Graphs share weights, state and caches; intermediate results are an estimate."""
        slots, context = self._settings["max_sequences"], self._settings["max_context"]
        weights = self.weight_bytes
        states = {s.name: s for graph in self.graphs for s in graph.states}.values()
        state = sum(s.nbytes({"slots": slots}) for s in states if s.kind in RECURRENT)
        cache = sum(s.nbytes({"slots": slots}) for s in states if s.kind in CACHES)
        logits = 4 * self._spec.vocab_size * max(graph.phase.logit_rows for graph in self.graphs)
        buffers = max(_kernel_buffers(graph, self.tables[graph.name]) for graph in self.graphs)
        activations = step_activations(self._spec, self.graphs, slots, context) + buffers + logits
        return MemoryPlan(slots, context, weights, weights, state, cache, activations)

    def describe(self, graph: Lowered) -> dict[str, Any]:
        """What the manifest says of a graph, its file apart."""
        weights = weight_inputs(graph.model, self.weights)
        inputs = [name for name in graph.shapes() if name not in weights]
        return {**graph.describe(), "inputs": inputs, "weights": weights}


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
