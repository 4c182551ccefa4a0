# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for kernels in graphs that a parser reads, and the kernels that take their places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN
from nemo_build.engines.gpu.ops import ONNX_TYPES
from nemo_build.engines.tensorrt.places import Place, fill, with_places
from nemo_build.engines.trt.emitter import FLOAT
from nemo_build.plugins.gpu.kernel import resolve
from nemo_build.plugins.gpu.node import Node

pytest.importorskip("triton")

from .tensorrt_machine import lowered

SIZES = (
    {"batch": 1, "steps": 1, "slots": 1, "chunks": 1},
    {"batch": 3, "steps": 200, "slots": 3, "chunks": 4},
)


def small(node: Node) -> onnx.ModelProto:
    """A graph of one kernel node, whose inputs are the graph's."""
    inputs = [
        onnx.helper.make_tensor_value_info(
            t.name, ONNX_TYPES[t.dtype], [d if isinstance(d, int) else None for d in t.shape]
        )
        for t in node.inputs
    ]
    names = [f"{t.name}.given" for t in node.outputs]
    outputs = [
        onnx.helper.make_tensor_value_info(n, ONNX_TYPES[t.dtype], [None] * len(t.shape))
        for n, t in zip(names, node.outputs, strict=True)
    ]
    made = onnx.helper.make_node(node.name, [t.name for t in node.inputs], names, "the", domain=KERNEL_DOMAIN)
    graph = onnx.helper.make_graph([made], "g", inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid(KERNEL_DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_stand_ins_have_the_kernels_types_and_shapes(tiny_bundle, phase):
    """In ONNX Runtime, for every kernel of the random checkpoint."""
    _, table, _ = lowered(tiny_bundle, "target", phase, FLOAT)
    for node in table.nodes():
        model, places, own = with_places(small(node), {node.name: node})
        assert [p.node for p in places] == [node]
        onnx.checker.check_model(model)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for sizes in SIZES:
            feeds = {t.name: np.zeros([resolve(d, sizes) for d in t.shape], t.dtype) for t in node.inputs}
            found = session.run(own, feeds)
            for array, tensor in zip(found, node.outputs, strict=True):
                assert array.dtype == tensor.dtype
                assert array.shape == tuple(resolve(d, sizes) for d in tensor.shape)


def test_a_node_that_is_not_its_kernel(tiny_bundle):
    model, table, _ = lowered(tiny_bundle, "mtp", "decode")
    nodes = {n.name: n for n in table.nodes()}
    (first, *_) = [n for n in model.graph.node if n.domain == KERNEL_DOMAIN]
    first.input.pop()
    with pytest.raises(ValueError, match="other inputs or outputs"):
        with_places(model, nodes)


class Tensor(SimpleNamespace):
    """A tensor of a network."""


class Layer:
    def __init__(self, inputs: list[Any], outputs: list[Any], stubborn: bool = False) -> None:
        self.inputs, self.outputs, self.stubborn, self.name = inputs, outputs, stubborn, ""
        self.num_inputs = len(inputs)

    def get_input(self, i: int) -> Any:
        return self.inputs[i]

    def get_output(self, i: int) -> Any:
        return self.outputs[i]

    def set_input(self, i: int, tensor: Any) -> None:
        if not self.stubborn:
            self.inputs[i] = tensor


def network(layers: list[Layer], inputs: list[Any], outputs: list[Any]) -> Any:
    return SimpleNamespace(
        num_layers=len(layers),
        num_inputs=len(inputs),
        num_outputs=len(outputs),
        get_layer=layers.__getitem__,
        get_input=inputs.__getitem__,
        get_output=list(outputs).__getitem__,
        mark_output=lambda t: outputs.append(t),
        unmark_output=lambda t: outputs.remove(t),
    )


@pytest.mark.parametrize("fault", ["", "dtype", "shape", "rank", "reader"])
def test_kernels_take_the_places_of_stand_ins(fault):
    x, y = Tensor(name="x", dtype=1, shape=(-1, 8)), Tensor(name="y", dtype=1, shape=(-1, 8))
    other, z = Tensor(name="other", dtype=1, shape=(4,)), Tensor(name="z", dtype=1, shape=(-1, 8))
    reader = Layer([y, None, other], [z], stubborn=fault == "reader")
    outputs = [z, y, other]
    given = Tensor(
        name="",
        dtype=2 if fault == "dtype" else 1,
        shape={"shape": (-1, 9), "rank": (-1,)}.get(fault, (3, 8)),
    )
    layer = Layer([], [given])
    asked = []

    def add(place: Place, inputs: list[Any]) -> Layer:
        asked.append((place.name, inputs))
        return layer

    made = network([reader], [x], outputs)
    places = [Place("the", SimpleNamespace(), ("x", "other"), ("y",))]
    if fault:
        with pytest.raises(RuntimeError, match="still read: y" if fault == "reader" else "expected was"):
            fill(None, made, places, ["y", "z"], add)
        return
    fill(None, made, places, ["y", "z"], add)
    assert asked == [("the", [x, other])]
    assert reader.inputs == [given, None, other]
    assert (layer.name, given.name, y.name) == ("the", "y", "y/stand_in")
    assert outputs == [z, given]
