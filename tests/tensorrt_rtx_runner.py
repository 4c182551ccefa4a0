# SPDX-License-Identifier: Apache-2.0
"""Runs graphs lowered for TensorRT-RTX in ONNX Runtime, with what that lacks put into standard ops.

What only TensorRT-RTX has is replaced by what it is defined to compute: attention over a filled part of a cache by
attention with a mask, FP4 constants by their values, FP4 rounding at run time by the portable graph's text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from nemo_build.engines.trt.emitter import FLOAT
from nemo_build.engines.trt.forms import WeightTable
from nemo_build.engines.trt.lowering import lower, lowered_states
from nemo_build.engines.trt.phases import DECODE, PREFILL, phases_of
from nemo_build.engines.weights import stored_tensors
from nemo_build.plugins.codecs.nvfp4 import E2M1
from nemo_build.plugins.formats import activations

from .lowered_pair import StepsOfBatches

ORT_OPSET = 24


class LoweredGraph:
    """Phases of one graph of a bundle on state of their own.

    Args:
        bundle: The model bundle.
        graph: The graph's name.
        slots: Rows of the state.
        context: Positions of a row.
        sms: GPUs it is lowered for.
        convert: Form for unquantized projections.
        rounds: Whether projections round their inputs as the checkpoint says.
        names: The phases.
    """

    def __init__(
        self,
        bundle: Path,
        graph: str = "target",
        *,
        slots: int = 3,
        context: int = 128,
        sms: tuple[int, ...] = (120,),
        convert: str | None = None,
        rounds: bool = True,
        names: tuple[str, ...] = (DECODE, PREFILL),
    ) -> None:
        self.graph = graph
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        self.table = WeightTable(stored_tensors([model]), sms, convert=convert, compute=FLOAT, rounds=rounds)
        phases = {p.name: p for p in phases_of(slots, context) if p.name in names}
        lowered = {n: lower(model, p, self.table, FLOAT) for n, p in phases.items()}
        contents = {n: b"".join(map(bytes, w.chunks(bundle))) for n, w in self.table.weights.items()}
        self.sessions = {n: _session(m, contents) for n, m in lowered.items()}
        self.states = lowered_states(model, phases[DECODE], FLOAT)
        self.state = {s.name: np.zeros(s.resolve({"slots": slots}), np.float32) for s in self.states}

    def width(self, name: str) -> int:
        """The last dimension of an input."""
        (found,) = (i for i in self.sessions[DECODE].get_inputs() if i.name == name)
        return int(found.shape[-1])

    def run(self, phase: str, inputs: dict[str, Any]) -> dict[str, Any]:
        """One step of all rows, row i in slot i; returns every output, and advances the state."""
        session = self.sessions[phase]
        names = [o.name for o in session.get_outputs()]
        taken = {i.name for i in session.get_inputs()}
        feeds = {n: v for n, v in {**self.state, **inputs}.items() if n in taken}
        found = dict(zip(names, session.run(names, feeds), strict=True))
        self.state.update({s.name: found[s.output] for s in self.states})
        return found


class LoweredModel(StepsOfBatches, LoweredGraph):
    """All phases of a step graph, run as a session of the portable graph would; arguments as of the base."""


def _session(model: onnx.ModelProto, contents: dict[str, bytes]) -> ort.InferenceSession:
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.raw_data = contents[tensor.name]
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    _mask_attention(model)
    _decode_constants(model)
    _round_inputs(model)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _replace_nodes(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> None:
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _mask_attention(model: onnx.ModelProto) -> None:
    """A mask in place of lengths and a causal flag.

    Query i of a row sees the keys j <= i + lengths - L if it is causal, else j < lengths.
    """
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Attention":
            nodes.append(node)
            continue
        q, k, v, *_, lengths = node.input
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        scale = attributes["scale"]
        last = "Add (i4, first4)" if attributes["is_causal"] else "Add (no_i, end)"
        text = f"""<ir_version: 11, opset_import: ["" : {ORT_OPSET}]> g (float[a] q) => (float[a] y) {{
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            zero1 = Constant <value_ints = [0]> ()
            axes = Constant <value_ints = [1, 2, 3]> ()
            axes013 = Constant <value_ints = [0, 1, 2]> ()
            axes012 = Constant <value_ints = [0, 1, 3]> ()
            steps = Shape <start = 2, end = 3> (q)
            steps0 = Squeeze (steps, zero1)
            size = Shape <start = 2, end = 3> (k)
            size0 = Squeeze (size, zero1)
            i = Range (zero, steps0, one)
            j = Range (zero, size0, one)
            i4 = Unsqueeze (i, axes012)
            j4 = Unsqueeze (j, axes013)
            first = Sub (lengths, steps)
            first4 = Unsqueeze (first, axes)
            lengths4 = Unsqueeze (lengths, axes)
            end = Sub (lengths4, one)
            no_i = Mul (i4, zero)
            last = {last}
            mask = LessOrEqual (j4, last)
            y = Attention <scale : float = {scale}> (q, k, v, mask)
        }}"""
        outer = {"q": q, "k": k, "v": v, "lengths": lengths, "y": node.output[0]}
        nodes += _named(onnx.parser.parse_model(text).graph.node, outer, node.name)
    _replace_nodes(model, nodes)


def _named(nodes: Any, outer: dict[str, str], prefix: str) -> list[onnx.NodeProto]:
    """Nodes with their values renamed: some to values of the graph around them, the others made unique."""
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [outer.get(n, f"{prefix}/{n}") if n else "" for n in names]
    return list(nodes)


def _decode_constants(model: onnx.ModelProto) -> None:
    """Products of constants in 4 and 8 bits become float32 constants."""
    constants = {t.name: t for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "DequantizeLinear" or any(n not in constants for n in node.input[:2]):
            nodes.append(node)
            continue
        codes, scales = (_numbers(constants[n]) for n in node.input[:2])
        attributes = {a.name: a.i for a in node.attribute}
        if "block_size" in attributes:
            scales = np.repeat(scales, attributes["block_size"], axis=attributes["axis"])
        decoded = onnx.numpy_helper.from_array((codes * scales).astype(np.float32), node.output[0])
        constants[node.output[0]] = decoded
        model.graph.initializer.append(decoded)
    _replace_nodes(model, nodes)
    used = {n for node in model.graph.node for n in node.input}
    kept = [t for t in model.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _numbers(tensor: onnx.TensorProto) -> np.ndarray:
    """A constant's values in float32."""
    raw, shape = np.frombuffer(tensor.raw_data, np.uint8), tuple(tensor.dims)
    if tensor.data_type in (onnx.TensorProto.FLOAT4E2M1, onnx.TensorProto.INT4):
        nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(shape)
        signed = nibbles.astype(np.int16) - 16 * (nibbles >= 8)
        return E2M1[nibbles] if tensor.data_type == onnx.TensorProto.FLOAT4E2M1 else signed.astype(np.float32)
    if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN:
        return raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(shape)
    return onnx.numpy_helper.to_array(tensor).astype(np.float32)


def _round_inputs(model: onnx.ModelProto) -> None:
    """FP4 rounding at run time and its two decodings become the portable graph's text."""
    by_input: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            by_input.setdefault(name, []).append(node)
    gone: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "TRT_FP4DynamicQuantize":
            (scales,) = by_input[node.output[1]]
            (last,) = by_input[node.output[0]]
            assert last.input[1] == scales.output[0]
            gone |= {scales.name, last.name}
            body = activations.nvfp4("out", "x", "scale", "q")
            text = f'<ir_version: 11, opset_import: ["" : {ORT_OPSET}]> g (float[a] x) => (float[a] out) {{ {body} }}'
            outer = {"x": node.input[0], "scale": node.input[1], "out": last.output[0]}
            nodes += _named(onnx.parser.parse_model(text).graph.node, outer, node.name)
        elif node.name not in gone:
            nodes.append(node)
    _replace_nodes(model, nodes)
