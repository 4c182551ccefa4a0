# SPDX-License-Identifier: Apache-2.0
"""Lowering of a portable step graph to kernel nodes and standard ops, for backends that launch kernels of our own.

The contract is that of :mod:`nemo_build.engines.trt.lowering` (rows are slots, two phases), with kernel nodes for
custom ops, every weight as an input of the graph, and all state written in place. ``docs/gpu_engines.md`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import onnx

from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable
from nemo_build.engines.gpu.ops import KernelOps, kernel_modules
from nemo_build.engines.gpu.weights import KernelWeights
from nemo_build.engines.trt.emitter import BFLOAT16
from nemo_build.engines.trt.lowering import lower, lowered_states
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.trt.phases import Phase
from nemo_build.engines.weights import external_entries
from nemo_build.errors import UserError
from nemo_build.state import StateSpec

_FLOAT = onnx.TensorProto.FLOAT
_TYPES = {"bfloat16": onnx.TensorProto.BFLOAT16, "float32": _FLOAT}


def lower_kernels(
    model: onnx.ModelProto,
    phase: Phase,
    weights: KernelWeights,
    kernels: KernelTable,
) -> onnx.ModelProto:
    """One phase's graph of a portable graph, which stays as it is.

    Args:
        model: The portable graph, with the checkpoint's tensors as external initializers.
        phase: Which graph, and its sizes.
        weights: Gets the weights that the graph needs; it says what type activations have.
        kernels: Gets the kernels that the graph needs. Each graph has a table of its own.

    Returns:
        A graph whose inputs are those of a step, the state, and the weights, in this order.

    Raises:
        UserError: An op is used in a way that there is no kernel for, or Triton is not installed.
    """
    shared = KernelOps(weights, kernels, _choices(model))
    problems: dict[str, list[str]] = {}
    ops = {name: _recording(module, shared, problems) for name, module in kernel_modules().items()}
    lowered = lower(_with_float_parameters(model, weights), phase, weights, weights.compute, ops)
    if problems:
        listed = [f"{what} ({_some(names)})" for what, names in problems.items()]
        raise UserError("There are no kernels for what the model needs:", listed)
    _make_weights_inputs(lowered)
    states = {name: s for s in kernel_states(model, phase, weights.compute) for name in (s.name, s.output)}
    for info in (*lowered.graph.input, *lowered.graph.output):
        if info.name in states:
            info.type.tensor_type.elem_type = _TYPES[states[info.name].dtype]
    lowered.graph.value_info.extend(shared.values)
    lowered.opset_import.add(domain=KERNEL_DOMAIN, version=1)
    return lowered


def kernel_states(model: onnx.ModelProto, phase: Phase, compute: int = BFLOAT16) -> list[StateSpec]:
    """The graph's state buffers, all updated in place; that of the convolution is of the type of activations."""
    states = lowered_states(model, phase, compute)
    kind = "bfloat16" if compute == BFLOAT16 else "float32"
    return [replace(s, dtype=kind) if s.kind == "conv" else s for s in states]


def weight_inputs(model: onnx.ModelProto, weights: KernelWeights) -> list[str]:
    """Names of a lowered graph's inputs that are weights."""
    return [i.name for i in model.graph.input if i.name in weights.weights]


def _recording(
    module: ModuleType, shared: KernelOps, problems: dict[str, list[str]]
) -> Callable[[Context, onnx.NodeProto], None]:
    """An op's lowering that notes what kernels cannot do and goes on."""

    def lower_op(c: Context, node: onnx.NodeProto) -> None:
        try:
            module.lower(shared, c, node)
        except ValueError as error:
            problems.setdefault(f"{node.op_type}: {error}".rstrip("."), []).append(node.name)

    return lower_op


def _some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _choices(model: onnx.ModelProto) -> dict[str, int]:
    """How many entries each TopK gives, by the name of its indices."""
    numbers = {t.name: t for t in model.graph.initializer if not external_entries(t)}
    return {
        node.output[1]: int(onnx.numpy_helper.to_array(numbers[node.input[1]]).item())
        for node in model.graph.node
        if node.op_type == "TopK" and node.input[1] in numbers
    }


def _with_float_parameters(model: onnx.ModelProto, weights: KernelWeights) -> onnx.ModelProto:
    """The graph with stored tensors that it casts to float32 cast at build: as inputs they could not be folded."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    cast: dict[str, str] = {}
    kept = []
    for node in copy.graph.node:
        if node.op_type == "Cast" and node.input[0] in weights.tensors and node.attribute[0].i == _FLOAT:
            cast[node.output[0]] = weights.float32(node.input[0])
            continue
        node.input[:] = [cast.get(name, name) for name in node.input]
        kept.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    return copy


def _make_weights_inputs(lowered: onnx.ModelProto) -> None:
    """Turn external initializers into inputs."""
    constants = []
    for tensor in lowered.graph.initializer:
        if external_entries(tensor):
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            lowered.graph.input.append(info)
        else:
            constants.append(tensor)
    del lowered.graph.initializer[:]
    lowered.graph.initializer.extend(constants)
