# SPDX-License-Identifier: Apache-2.0
"""One-node models of the custom ops, and random inputs for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from nemo_build.plugins import native
from nemo_build.plugins.registry import STANDARD_OPSET, plugins_by_name, register_schemas
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION

many = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)

EVERY_KERNEL = ("reference", *native.instruction_sets())
"""What an op can run in on this machine."""


def one_node_model(
    name: str, inputs: list[np.ndarray | None], attributes: dict[str, Any], *, function: bool = True
) -> onnx.ModelProto:
    """A model of one node of the op ``name``, with its reference function or without."""
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
        functions=[plugin.function(attributes, present, inputs=len(inputs))] if function else [],
        opset_imports=[helper.make_opsetid("", STANDARD_OPSET), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    register_schemas()
    onnx.checker.check_model(model, full_check=True, check_custom_domain=True)
    return model


def run_function(
    name: str,
    inputs: list[np.ndarray | None],
    attributes: dict[str, Any],
    *,
    instruction_set: str = "reference",
    threads: int = 1,
) -> list[np.ndarray]:
    """Run the op in ONNX Runtime: its reference function, or the native kernel of an instruction set."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    native_kernel = instruction_set != "reference"
    if native_kernel:
        options.register_custom_ops_library(str(native.library_file(instruction_set)))
    model = one_node_model(name, inputs, attributes, function=not native_kernel)
    session = ort.InferenceSession(model.SerializeToString(), options)
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


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def check(name: str, inputs: list, attributes: dict, lengths: np.ndarray) -> None:
    """Compare function and native kernels with the reference: the first output on valid rows, the others everywhere."""
    plugin = plugins_by_name()[name]
    before = [None if a is None else a.copy() for a in inputs]
    want = plugin.reference(*inputs, **attributes)
    want = want if isinstance(want, tuple) else (want,)
    for kind in ("reference", *native.instruction_sets()):
        got = run_function(name, inputs, attributes, instruction_set=kind, threads=2)
        valid = np.arange(got[0].shape[1]) < lengths[:, None]
        size = max(np.abs(want[0][valid]).max(initial=0), 1)
        np.testing.assert_allclose(got[0][valid], want[0][valid], atol=2e-5 * size, rtol=2e-5, err_msg=kind)
        for g, w in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(g, w, atol=2e-5, rtol=2e-5, err_msg=kind)
    for a, b in zip(inputs, before, strict=True):
        assert a is None or np.array_equal(a, b, equal_nan=True)
