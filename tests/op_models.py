# SPDX-License-Identifier: Apache-2.0
"""One-node models of the custom ops, and random inputs for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from nemo_build.plugins.registry import STANDARD_OPSET, plugins_by_name, register_schemas
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION


def one_node_model(name: str, inputs: list[np.ndarray | None], attributes: dict[str, Any]) -> onnx.ModelProto:
    """A model of one node of the op ``name`` that carries its reference function."""
    plugin = plugins_by_name()[name]
    names = plugin.input_names(len(inputs))
    used = [n if a is not None else "" for n, a in zip(names, inputs, strict=True)]
    present = [n for n in used if n]
    node = helper.make_node(name, used, [p.name for p in plugin.op.outputs], domain=DOMAIN, **attributes)
    stored = {n: a for n, a in zip(names, inputs, strict=True) if a is not None and _is_stored(a)}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), [None] * a.ndim)
        for n, a in zip(names, inputs, strict=True)
        if a is not None and n not in stored
    ]
    kind = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    ranks = {n: a.ndim for n, a in zip(names, inputs, strict=True) if a is not None}
    first = names[0]
    outputs = [
        helper.make_tensor_value_info(p.name, kind, [None] * ranks[plugin.op.aliases.get(p.name, first)])
        for p in plugin.op.outputs
    ]
    model = helper.make_model(
        helper.make_graph(
            [node], "op", infos, outputs, [numpy_helper.from_array(a, n) for n, a in stored.items()]
        ),
        functions=[plugin.function(attributes, present, inputs=len(inputs))],
        opset_imports=[helper.make_opsetid("", STANDARD_OPSET), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    register_schemas()
    onnx.checker.check_model(model, full_check=True, check_custom_domain=True)
    return model


def run_function(name: str, inputs: list[np.ndarray | None], attributes: dict[str, Any]) -> list[np.ndarray]:
    """Run the op's reference function in ONNX Runtime."""
    session = ort.InferenceSession(one_node_model(name, inputs, attributes).SerializeToString())
    names = plugins_by_name()[name].input_names(len(inputs))
    feeds = {n: a for n, a in zip(names, inputs, strict=True) if a is not None and not _is_stored(a)}
    return session.run(None, feeds)


def _is_stored(array: np.ndarray) -> bool:
    """Whether NumPy alone does not know the type, so that the array goes into the model as an initializer."""
    return array.dtype.kind == "V"


def step_control(rng: np.random.Generator, batch: int, slots: int, steps: int, ring: int, room: int):
    """Random ``slots, past, accepted, lengths``: distinct slots in any order, padding rows, new sequences."""
    order = rng.permutation(slots)[:batch].astype(np.int64)
    lengths = rng.integers(0, steps + 1, batch)
    accepted = rng.integers(0, ring + 1, batch)
    past = accepted + np.where(
        rng.random(batch) < 0.3, 0, rng.integers(0, max(room - steps - ring, 0) + 1, batch)
    )
    return order, past.astype(np.int64), accepted.astype(np.int64), lengths.astype(np.int64)
