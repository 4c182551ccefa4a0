# SPDX-License-Identifier: Apache-2.0
"""Kernel nodes in a graph for a parser that does not know them: stand-ins, which plugins replace in the network.

A stand-in is made of standard ops. It has the type and the shape of what the kernel gives, and is no constant, so the
parser makes of everything around it what it would make of it around the kernel. What kernels read, and the stand-ins,
are outputs of the graph, so that the network has them under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import onnx

from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN
from nemo_build.engines.gpu.ops import ONNX_TYPES
from nemo_build.engines.trt.emitter import FLOAT, Emitter
from nemo_build.plugins.gpu.kernel import Ceil, Dim
from nemo_build.plugins.gpu.node import Node


@dataclass(frozen=True)
class Place:
    """Where a kernel goes.

    Attributes:
        name: The kernel node's name in the graph.
        node: The kernel.
        inputs: Names of the values that it reads.
        outputs: Names of the values that it gives, which stand-ins have until then.
    """

    name: str
    node: Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def with_places(
    model: onnx.ModelProto, nodes: Mapping[str, Node]
) -> tuple[onnx.ModelProto, list[Place], list[str]]:
    """A graph with stand-ins for its kernel nodes.

    Args:
        model: A lowered graph, which stays as it is.
        nodes: The kernels by the op type of their nodes.

    Returns:
        The graph, the places in the order of the graph, and the graph's own outputs.

    Raises:
        ValueError: A kernel node has other inputs or outputs than its kernel.
    """
    graph = model.graph
    given = {i.name for i in graph.input}
    constants = {t.name for t in graph.initializer}
    own = [o.name for o in graph.output]
    g, places = Emitter("stand_in_constant"), []
    marked: dict[str, None] = {}
    for node in graph.node:
        if node.domain != KERNEL_DOMAIN:
            g.nodes.append(node)
            continue
        kernel = nodes[node.op_type]
        if (len(node.input), len(node.output)) != (len(kernel.inputs), len(kernel.outputs)):
            raise ValueError(f"{node.name} has other inputs or outputs than {kernel.name}.")
        g.scope = f"{node.name}/stand_in"
        inputs = [g.op("Identity", name) if name in constants else name for name in node.input]
        _stand_in(g, kernel, inputs, node.output)
        marked |= dict.fromkeys([name for name in inputs if name not in given])
        marked |= dict.fromkeys(node.output)
        places.append(Place(node.name, kernel, tuple(inputs), tuple(node.output)))
    types = _output_types(places)
    outputs = [*graph.output, *(onnx.ValueInfoProto(name=n, type=types[n]) for n in marked if n not in own)]
    made = onnx.helper.make_graph(
        g.nodes, graph.name, graph.input, outputs, [*graph.initializer, *g.constants]
    )
    opsets = [o for o in model.opset_import if o.domain != KERNEL_DOMAIN]
    return onnx.helper.make_model(made, opset_imports=opsets, ir_version=model.ir_version), places, own


def _stand_in(g: Emitter, kernel: Node, inputs: list[str], outputs: Any) -> None:
    """Values of a kernel's types and shapes: the first number that it reads, repeated."""
    lengths: dict[str, str] = {}
    for name, tensor in zip(inputs, kernel.inputs, strict=True):
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, str) and dim not in lengths:
                lengths[dim] = g.op("Shape", name, start=axis, end=axis + 1)
    number = g.cast(g.op("Slice", g.reshape(inputs[0], -1), g.ints(0), g.ints(1)), FLOAT)
    for name, tensor in zip(outputs, kernel.outputs, strict=True):
        shape = g.op("Concat", *(_length(g, d, lengths) for d in tensor.shape), axis=0)
        # What is a number is to be one for the parser too, which does not look through the other ops.
        known = [d if isinstance(d, int) else 0 for d in tensor.shape]
        values = g.reshape(g.op("Expand", number, shape), *known)
        g.op("Cast", values, out=name, to=ONNX_TYPES[tensor.dtype])


def _length(g: Emitter, dim: Dim, lengths: Mapping[str, str]) -> str:
    """A dimension as an int64 vector of one."""
    if isinstance(dim, int):
        return g.ints(dim)
    if isinstance(dim, Ceil):
        return g.op("Div", g.op("Add", lengths[dim.size], g.ints(dim.by - 1)), g.ints(dim.by))
    return lengths[dim]


def _output_types(places: list[Place]) -> dict[str, onnx.TypeProto]:
    """Types of what kernels read and give; shapes are left to the parser."""
    found = {}
    for place in places:
        named = (*zip(place.inputs, place.node.inputs, strict=True),)
        named += (*zip(place.outputs, place.node.outputs, strict=True),)
        for name, tensor in named:
            found[name] = onnx.helper.make_tensor_type_proto(
                ONNX_TYPES[tensor.dtype], [None] * len(tensor.shape)
            )
    return found


class AddKernel(Protocol):
    """Adds a kernel to a network as a layer."""

    def __call__(self, place: Place, inputs: list[Any]) -> Any: ...


def fill(trt: Any, network: Any, places: list[Place], own: list[str], add: AddKernel) -> None:
    """Put kernels in their places: what read a stand-in reads what the kernel gives.

    Args:
        trt: The library's module.
        network: The parsed network of a graph of :func:`with_places`.
        places: The places, in order.
        own: Names of the outputs that the network is to have.
        add: What adds a kernel.

    Raises:
        RuntimeError: A kernel gives another type or shape than its stand-in, or something still reads a stand-in.
    """
    values = {t.name: t for t in (network.get_input(i) for i in range(network.num_inputs))}
    outputs = {t.name: t for t in (network.get_output(i) for i in range(network.num_outputs))}
    stand_ins = {name: outputs[name] for place in places for name in place.outputs}
    values |= {name: tensor for name, tensor in outputs.items() if name not in stand_ins}
    for name, tensor in outputs.items():
        if name in stand_ins or name not in own:
            network.unmark_output(tensor)
    for name, tensor in stand_ins.items():
        tensor.name = f"{name}/stand_in"
    renamed = {tensor.name: name for name, tensor in stand_ins.items()}
    readers = _readers(network)
    for place in places:
        layer = add(place, [values[name] for name in place.inputs])
        layer.name = place.name
        for i, name in enumerate(place.outputs):
            made, stand_in = layer.get_output(i), stand_ins[name]
            if not _fits(made, stand_in):
                raise RuntimeError(
                    f"{name} is {made.dtype} {made.shape}; expected was {stand_in.dtype} {stand_in.shape}"
                )
            made.name = name
            values[name] = made
            for reader, position in readers.get(stand_in.name, ()):
                reader.set_input(position, made)
            if name in own:
                network.mark_output(made)
    left = sorted(renamed[name] for name in _readers(network) if name in renamed)
    if left:
        raise RuntimeError(f"stand-ins are still read: {', '.join(left)}")


def _fits(made: Any, stand_in: Any) -> bool:
    """Whether a tensor has another's type and rank, and its dimensions where they are numbers in both."""
    pairs = zip(made.shape, stand_in.shape, strict=False)
    same = all(a == b or min(a, b) < 0 for a, b in pairs)
    return bool(same and made.dtype == stand_in.dtype and len(made.shape) == len(stand_in.shape))


def _readers(network: Any) -> dict[str, list[tuple[Any, int]]]:
    """Which layers read a tensor, and as which of their inputs, by the tensor's name."""
    found: dict[str, list[tuple[Any, int]]] = {}
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        for j in range(layer.num_inputs):
            tensor = layer.get_input(j)
            if tensor is not None:
                found.setdefault(tensor.name, []).append((layer, j))
    return found
