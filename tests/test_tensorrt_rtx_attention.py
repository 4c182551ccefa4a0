# SPDX-License-Identifier: Apache-2.0
"""Attention lowered for TensorRT-RTX against the op's reference, with everything that the op can be asked for."""

from __future__ import annotations

import itertools
import json

import numpy as np
import onnx
import pytest

from nemo_build.engines.trt.emitter import FLOAT
from nemo_build.engines.trt.forms import WeightTable
from nemo_build.engines.trt.lowering import lower
from nemo_build.engines.trt.phases import phases_of
from nemo_build.plugins.cached_attention.reference import reference
from nemo_build.plugins.schema import DOMAIN
from nemo_build.state import StateSpec

from .tensorrt_rtx_runner import _session

ROWS, CONTEXT, HEADS, GROUP, WIDTH, ROTARY = 3, 40, 2, 3, 8, 6
STATES = [
    StateSpec(f"{kind}.layer", kind, ("slots", HEADS, "context", WIDTH), "float32")
    for kind in ("key", "value")
]
RANDOM = np.random.default_rng(0)
SINKS = RANDOM.standard_normal(HEADS * GROUP).astype(np.float32)
ANGLES = RANDOM.standard_normal((CONTEXT, ROTARY // 2)).astype(np.float32)
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)


def portable(window: int, causal: int, sinks: bool, tables: bool) -> onnx.ModelProto:
    """A graph of one node."""
    helper, proto = onnx.helper, onnx.TensorProto
    floats = {"q": HEADS * GROUP * WIDTH, "k": HEADS * WIDTH, "v": HEADS * WIDTH}
    inputs = [helper.make_tensor_value_info(n, proto.FLOAT, ["batch", "steps", w]) for n, w in floats.items()]
    inputs += [helper.make_tensor_value_info(s.name, proto.FLOAT, list(s.shape)) for s in STATES]
    inputs += [helper.make_tensor_value_info(n, proto.INT64, ["batch"]) for n in ("slots", "past", "lengths")]
    outputs = [helper.make_tensor_value_info("y", proto.FLOAT, ["batch", "steps", floats["q"]])]
    outputs += [helper.make_tensor_value_info(s.output, proto.FLOAT, list(s.shape)) for s in STATES]
    constants = {"sinks": SINKS} if sinks else {}
    constants |= {"cos": COS, "sin": SIN} if tables else {}
    node = helper.make_node(
        "CachedAttention",
        [i.name for i in inputs] + [n if n in constants else "" for n in ("sinks", "cos", "sin")],
        [o.name for o in outputs],
        name="attention",
        domain=DOMAIN,
        scale=0.5,
        window=window,
        causal=causal,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        inputs,
        outputs,
        [onnx.numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    model = helper.make_model(graph)
    helper.set_model_props(model, {"nemo_build.state": json.dumps([s.to_json() for s in STATES])})
    return model


@pytest.mark.parametrize(
    ("window", "causal", "sinks", "tables"),
    list(itertools.product((0, 1, 9, 1000), (0, 1), (False, True), (False, True))),
)
def test_attention(window, causal, sinks, tables):
    model = portable(window, causal, sinks, tables)
    phases = {p.name: p for p in phases_of(ROWS, CONTEXT)}
    lowered = {n: lower(model, p, WeightTable({}, (120,), compute=FLOAT), FLOAT) for n, p in phases.items()}
    sessions = {n: _session(m, {}) for n, m in lowered.items()}
    room = phases["decode"].cache_rows
    held = [np.full((ROWS, HEADS, room, WIDTH), 7, np.float32) for _ in STATES]
    wanted = [np.zeros((ROWS, HEADS, CONTEXT, WIDTH), np.float32) for _ in STATES]
    past = np.zeros(ROWS, np.int64)
    extra = {
        "sinks": SINKS if sinks else None,
        "cos": COS if tables else None,
        "sin": SIN if tables else None,
    }
    for phase, lengths in (("prefill", [12, 1, 17]), ("decode", [1, 0, 8]), ("decode", [7, 3, 2])):
        rows = {"past": past, "lengths": np.array(lengths)}
        shape = ROWS, max(lengths)
        q, k, v = (
            RANDOM.standard_normal((*shape, n * WIDTH)).astype(np.float32)
            for n in (HEADS * GROUP, HEADS, HEADS)
        )
        names = [s.name for s in STATES]
        got = sessions[phase].run(
            None, {"q": q, "k": k, "v": v, **rows, **dict(zip(names, held, strict=True))}
        )
        y, *wanted = reference(
            q, k, v, *wanted, np.arange(ROWS), scale=0.5, window=window, causal=causal, **rows, **extra
        )
        held = got[1:]
        valid = np.arange(shape[1]) < rows["lengths"][:, None]
        np.testing.assert_allclose(got[0][valid], y[valid], rtol=1e-4, atol=1e-5)
        past = past + rows["lengths"]
        for slot, n in enumerate(past):
            for a, b in zip(held, wanted, strict=True):
                np.testing.assert_allclose(a[slot, :, :n], b[slot, :, :n], rtol=1e-5, atol=1e-6)
