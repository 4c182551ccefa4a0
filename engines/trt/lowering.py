# SPDX-License-Identifier: Apache-2.0
"""Lowering of a portable step graph to what TensorRT-RTX and TensorRT compile.

Custom ops become what their module makes of them, by default the standard ops of
:mod:`~nemo_build.engines.trt.ops`; standard ops stay as they are, in float32. Rows are slots: the graph loses its input
``slots``, and state buffers have as many rows as the step. ``docs/tensorrt_rtx.md`` has the contract.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import onnx

from nemo_build.engines.trt.emitter import BFLOAT16, Emitter
from nemo_build.engines.trt.forms import COMPUTE_NAMES, ONNX_TYPES, WeightTable
from nemo_build.engines.trt.ops import Context, op_modules, refuse
from nemo_build.engines.trt.phases import DECODE, PREFILL, Phase
from nemo_build.engines.weights import CopiedWeight, Weight
from nemo_build.plugins.schema import DOMAIN
from nemo_build.state import CACHES, StateSpec

Lower = Callable[[Context, onnx.NodeProto], None]
"""Emits what takes the place of a custom op's node."""

OVERFLOW = "expert_overflow"
"""Output of a prefill graph with experts, int64 ``[1]``: how many tokens too many an expert was given, at worst."""

TOKENS = "tokens"
"""Output of a decode graph that takes tokens and gives logits, int64 ``[rows]``: the likeliest token by each row of
logits, the lowest id among equals."""

LOGITS_SUM = "logits_sum"
"""Output of the same, float32 ``[rows]``: finite if and only if all of a row's logits are; else its token is void."""

HIDDEN_ROWS = "hidden_rows"
"""Output of a decode graph that is fed hidden states, float32 ``[rows, H]``: its own in the rows of the logits."""

_STATE_KEY = "nemo_build.state"
_IR_VERSION = 11  # the first with FLOAT4E2M1
_OPSET = 24  # the first with TensorScatter
_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


def lower(
    model: onnx.ModelProto,
    phase: Phase,
    table: WeightTable,
    compute: int = BFLOAT16,
    ops: Mapping[str, Lower] | None = None,
) -> onnx.ModelProto:
    """One phase's graph of a portable graph, which stays as it is.

    Args:
        model: The portable graph, with the checkpoint's tensors as external initializers.
        phase: Which graph, and its sizes.
        table: Gets the weights that the graph needs. External data of the result are still to be pointed at.
        compute: ONNX type that projections and attention multiply in, bfloat16 or float32.
        ops: Lowerings of custom ops by name; those of :mod:`~nemo_build.engines.trt.ops` unless given.

    Raises:
        UserError: An op is used in a way that the backend has no formulation of.
    """
    states = lowered_states(model, phase, compute)
    inputs = [_with_state(i, {s.name: s for s in states}) for i in model.graph.input if i.name != "slots"]
    shapes = {i.name: _shape(i) for i in inputs}
    shapes |= {t.name: tuple(t.dims) for t in model.graph.initializer}
    used = {n for node in model.graph.node for n in node.input} | {o.name for o in model.graph.output}
    c = Context(Emitter(), phase, table, shapes, used, compute)
    ops = {name: module.lower for name, module in op_modules().items()} if ops is None else ops
    for node in model.graph.node:
        _lower_node(c, node, ops)
    outputs = [_with_state(o, {s.output: s for s in states}) for o in model.graph.output]
    if phase.name == DECODE and "input_ids" in shapes:
        outputs += emit_choices(c.g, outputs, feeds_itself="hidden_in" in shapes)
    if phase.name == PREFILL and c.overflows:
        worst = c.g.op("Concat", *c.overflows, axis=0)
        c.g.op("ReduceMax", worst, c.g.ints(0), out=OVERFLOW, keepdims=1)
        outputs.append(onnx.helper.make_tensor_value_info(OVERFLOW, onnx.TensorProto.INT64, [1]))
    graph = onnx.helper.make_graph(
        c.g.nodes, f"{model.graph.name}.{phase.name}", inputs, outputs, _initializers(c, model)
    )
    opsets = [onnx.helper.make_opsetid("", _OPSET), onnx.helper.make_opsetid("trt", 1)]
    lowered = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    return lowered


def emit_choices(
    g: Emitter, outputs: Iterable[onnx.ValueInfoProto], *, feeds_itself: bool
) -> list[onnx.ValueInfoProto]:
    """Emit what a device needs to go on by itself.

    Args:
        g: Gets the nodes.
        outputs: The graph's outputs so far.
        feeds_itself: Whether the graph takes hidden states that it gave.

    Returns:
        :data:`TOKENS`, :data:`LOGITS_SUM` and, of a graph that feeds itself, :data:`HIDDEN_ROWS`; nothing of a graph
        without logits.
    """
    widths = {o.name: _shape(o)[-1] for o in outputs}
    if "logits" not in widths:
        return []
    g.scope = "choices"
    chosen = g.op("ArgMax", "logits", axis=-1, keepdims=0)
    # What is chosen from logits that are no numbers is up to the library, and is looked up in the embedding.
    g.op("Min", g.op("Max", chosen, g.ints(0)), g.ints(int(widths["logits"]) - 1), out=TOKENS)
    g.op("ReduceSum", "logits", g.ints(-1), out=LOGITS_SUM, keepdims=0)
    made = onnx.helper.make_tensor_value_info
    found = [
        made(TOKENS, onnx.TensorProto.INT64, ["rows"]),
        made(LOGITS_SUM, onnx.TensorProto.FLOAT, ["rows"]),
    ]
    if feeds_itself and "hidden" in widths:
        lines = g.reshape("hidden", -1, int(widths["hidden"]))
        g.op("Gather", lines, "logit_rows", out=HIDDEN_ROWS, axis=0)
        found.append(made(HIDDEN_ROWS, onnx.TensorProto.FLOAT, ["rows", widths["hidden"]]))
    return found


def lowered_states(model: onnx.ModelProto, phase: Phase, compute: int = BFLOAT16) -> list[StateSpec]:
    """The graph's state buffers by what the lowered one has: sizes put in, one row a slot, caches as multiplied."""
    metadata = {p.key: p.value for p in model.metadata_props}
    portable = [StateSpec.from_json(s) for s in json.loads(metadata[_STATE_KEY])]
    sizes = {"slots": phase.slots, "pending": phase.pending, "context": phase.cache_rows}
    cache_type = _DTYPES[COMPUTE_NAMES[compute]]
    return [
        replace(s, shape=("slots", *s.resolve(sizes)[1:]), dtype=cache_type if s.kind in CACHES else s.dtype)
        for s in portable
    ]


def _lower_node(c: Context, node: onnx.NodeProto, ops: Mapping[str, Lower]) -> None:
    if node.domain == DOMAIN:
        if node.op_type not in ops:
            raise refuse(node, "the op is not known to it")
        c.g.scope = node.name
        ops[node.op_type](c, node)
        return
    kept = onnx.NodeProto()
    kept.CopyFrom(node)
    if node.op_type == "Cast" and any(a.i == onnx.TensorProto.FLOAT8E4M3FN for a in node.attribute):
        # Keys and values of an FP8 cache: the cache here is of a wider type, so they are not rounded.
        kept = onnx.helper.make_node("Identity", node.input, node.output, name=node.name)
    c.g.nodes.append(kept)


def _initializers(c: Context, model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The constants that nodes use: the emitter's, the graph's own, and the weights as external data."""
    used = {name for node in c.g.nodes for name in node.input}
    own = [t for t in model.graph.initializer if t.name in used and t.name not in c.weights.weights]
    for tensor in own:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            stored = c.weights.tensors[tensor.name]
            c.weights.weights[tensor.name] = CopiedWeight(stored, gathered=True)
    inline = [t for t in own if t.data_location != onnx.TensorProto.EXTERNAL]
    external = [_placeholder(w) for name, w in c.weights.weights.items() if name in used]
    return [*c.g.constants, *inline, *external]


def _placeholder(weight: Weight) -> onnx.TensorProto:
    """An external initializer whose place is not known yet."""
    tensor = onnx.TensorProto(name=weight.name, data_type=int(ONNX_TYPES[weight.dtype]), dims=weight.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="")
    return tensor


def _with_state(info: onnx.ValueInfoProto, states: Mapping[str, StateSpec]) -> onnx.ValueInfoProto:
    """A graph input or output; a state buffer gets the lowered type and shape."""
    if info.name not in states:
        return info
    state = states[info.name]
    dtype = onnx.TensorProto.BFLOAT16 if state.dtype == "bfloat16" else onnx.TensorProto.FLOAT
    return onnx.helper.make_tensor_value_info(info.name, dtype, ["batch", *state.shape[1:]])


def _shape(info: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim)
