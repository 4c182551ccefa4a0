# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a graph the CUDA provider has no kernel for, so that ONNX Runtime would run them on the CPU.

``cuda_kernels.json`` has the provider's kernels for standard ops of one opset, as its registry lists them: of each op,
sets of types that its type parameters may have. Nodes that only compute shapes run on the CPU by ONNX Runtime's own
choice, whatever kernels there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.shape_inference

from nemo_build.engines.trt.ops.cached_attention import KEY_LENGTHS

TABLE = Path(__file__).parent / "cuda_kernels.json"

_COMPILERS = "TRT_"  # how attributes begin that are for TensorRT

_TYPES: Mapping[int, str] = {
    int(onnx.TensorProto.FLOAT): "float",
    int(onnx.TensorProto.FLOAT16): "float16",
    int(onnx.TensorProto.BFLOAT16): "bfloat16",
    int(onnx.TensorProto.INT32): "int32",
    int(onnx.TensorProto.INT64): "int64",
    int(onnx.TensorProto.BOOL): "bool",
    int(onnx.TensorProto.UINT8): "uint8",
}


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def nodes_on_cpu(model: onnx.ModelProto) -> list[str]:
    """Standard ops of a graph without a CUDA kernel for their types: ``OP on TYPES (NODE)``, in the graph's order."""
    types = _types_of(model)
    opset = next(o.version for o in model.opset_import if o.domain == "")
    found = []
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx") and not _has_kernel(node, types, opset):
            kinds = dict.fromkeys(_TYPES.get(types[n], "?") for n in node.input if types.get(n))
            found.append(f"{node.op_type} on {', '.join(kinds)} ({node.name})")
    return found


def _types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The ONNX element type of each value that is known."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=False).graph
    infos = (*graph.input, *graph.output, *graph.value_info)
    types = {i.name: int(i.type.tensor_type.elem_type) for i in infos}
    return types | {t.name: int(t.data_type) for t in graph.initializer}


def _has_kernel(node: onnx.NodeProto, types: Mapping[str, int], opset: int) -> bool:
    """Whether one of the op's kernels takes the types of a node's inputs and outputs; unknown types fit."""
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    used: dict[str, set[str]] = {}
    for names, formals in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for i, name in enumerate(names):
            formal = formals[min(i, len(formals) - 1)]  # the last may be variadic
            if types.get(name):
                used.setdefault(formal.type_str, set()).add(_TYPES.get(types[name], "?"))
                used.setdefault(formal.name, set()).add(_TYPES.get(types[name], "?"))
    return any(
        all(used.get(parameter, set()) <= set(allowed.split()) for parameter, allowed in kernel.items())
        for kernel in _table()["kernels"].get(node.op_type, ())
    )


def adapt(model: onnx.ModelProto) -> None:
    """Make a lowered graph one for ONNX Runtime, in place.

    Attributes that only compilers know are left out. The sum of `past` and the number of columns stays on the GPU:
    ONNX Runtime moves what is computed from shapes and graph inputs to the CPU, which here would copy `past` to the
    host and wait for it in every step. A node between them, which changes nothing, leaves the sum where the input is.
    """
    sums = []
    for i, node in enumerate(model.graph.node):
        kept = [a for a in node.attribute if not a.name.startswith(_COMPILERS)]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)
        if KEY_LENGTHS in node.output:
            sums.append((i, node))
    for i, node in reversed(sums):
        past = node.input[0]
        node.input[0] = f"{past}/on_gpu"
        between = onnx.helper.make_node("Abs", [past], [node.input[0]], name=node.input[0])
        model.graph.node.insert(i, between)
