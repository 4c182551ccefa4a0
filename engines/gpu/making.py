# SPDX-License-Identifier: Apache-2.0
"""What makers of engines with kernels of our own share: lowered graphs, their weights and kernels, and the plan."""

from __future__ import annotations

import math
from typing import Any

import onnx

from nemo_build.engines.build import BuildOptions, Inputs, size_settings
from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable
from nemo_build.engines.gpu.lowering import kernel_states, lower_kernels, weight_inputs
from nemo_build.engines.gpu.weights import KernelWeights
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
        self._settings = settings
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

    def plan(self) -> MemoryPlan:
        """Graphs share weights, state and caches; intermediate results are an estimate."""
        slots, context = self._settings["max_sequences"], self._settings["max_context"]
        weights = sum(weight.nbytes for weight in self.weights.weights.values())
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
