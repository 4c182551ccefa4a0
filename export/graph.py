# SPDX-License-Identifier: Apache-2.0
"""A builder of step graphs on top of onnx-ir: scopes, checkpoint weights, custom ops, state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from nemo_build.errors import CheckpointError
from nemo_build.export.checkpoint import TensorInfo
from nemo_build.plugins.formats import INPUT_SCALE, LOW_RANK, SMOOTHING, format_of
from nemo_build.plugins.registry import STANDARD_OPSET, plugins_by_name
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION
from nemo_build.state import StateSpec

IR_VERSION = 10
ACTIVATION = ir.DataType.FLOAT
"""Type of activations and state in a portable graph; a backend may lower it."""

DTYPES = {
    "BF16": ir.DataType.BFLOAT16,
    "F16": ir.DataType.FLOAT16,
    "F32": ir.DataType.FLOAT,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "U8": ir.DataType.UINT8,
}
"""Safetensors dtypes that a graph can refer to."""

Dim = int | str


class GraphBuilder:
    """Builds one graph.

    Args:
        name: Name of the graph.
        tensors: The checkpoint's tensors by name.
        locate: Gives the external-data location of the file that holds a tensor.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, TensorInfo], locate: Callable[[TensorInfo], str]
    ) -> None:
        self.name = name
        self.states: list[StateSpec] = []
        self._tape = ir.tape.Tape()
        self._tensors = tensors
        self._locate = locate
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._values: dict[tuple[str, Any], ir.Value] = {}
        self._functions: dict[tuple[str, str], ir.Function] = {}
        self._scope: list[str] = []
        self._names: dict[str, int] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of the nodes made inside with ``name/``."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def input(self, name: str, shape: Sequence[Dim], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Declare a graph input."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self._inputs.append(value)
        return value

    def output(
        self, value: ir.Value, name: str, shape: Sequence[Dim], dtype: ir.DataType = ACTIVATION
    ) -> None:
        """Declare `value` a graph output under `name`."""
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(dtype)
        self._outputs.append(value)

    def state(self, state: StateSpec) -> ir.Value:
        """Declare a state buffer and return its input; :meth:`set_state` gives it its output."""
        self.states.append(state)
        return self.input(state.name, state.shape, ACTIVATION)

    def set_state(self, state: StateSpec, value: ir.Value) -> None:
        """Declare `value` the contents of the state buffer after the step."""
        self.output(value, state.output, state.shape)

    def op(self, op_type: str, *inputs: ir.Value | None, name: str = "", **attributes: Any) -> ir.Value:
        """Add a standard op with one output."""
        return self.ops(op_type, 1, *inputs, name=name, **attributes)[0]

    def ops(
        self, op_type: str, outputs: int, *inputs: ir.Value | None, name: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a standard op with several outputs."""
        return self._add(op_type, outputs, inputs, attributes, name=name or op_type.lower())

    def call(
        self, op_type: str, inputs: Sequence[ir.Value | None], *, name: str, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a custom op, and its reference function to the model."""
        plugin = plugins_by_name()[op_type]
        names = plugin.input_names(len(inputs))
        present = [n for n, v in zip(names, inputs, strict=True) if v is not None]
        body = plugin.body(attributes, present)
        function = self._functions.get((op_type, body))
        if function is None:
            others = sum(1 for known, _ in self._functions if known == op_type)
            proto = plugin.function(
                attributes, present, inputs=len(inputs), overload=f"v{others}" if others else ""
            )
            function = self._functions[op_type, body] = ir.serde.deserialize_function(proto)
        return self._add(
            op_type,
            len(plugin.op.outputs),
            inputs,
            attributes,
            name=name,
            domain=DOMAIN,
            overload=function.overload,
        )

    def constant(self, values: int | float | Sequence[int] | Sequence[float]) -> ir.Value:
        """A small constant: int64 for integers, float32 for floats; scalar for a scalar."""
        array = np.asarray(values)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        key = ("constant", (str(array.dtype), array.shape, array.tobytes()))
        if key not in self._values:
            name = f"constant_{len(self._values)}"
            self._values[key] = self._tape.initializer(ir.tensor(array, name=name), name)
        return self._values[key]

    def weight(self, name: str, dtype: ir.DataType | None = None) -> ir.Value:
        """A checkpoint tensor as an initializer whose data stay in the checkpoint's file.

        Args:
            name: The tensor's name in the checkpoint; also the initializer's.
            dtype: Cast to this type if it is stored in another.
        """
        if ("weight", name) not in self._values:
            info = self._tensors[name]
            tensor = ir.ExternalTensor(
                self._locate(info),
                info.offset,
                info.nbytes,
                DTYPES[info.dtype],
                shape=ir.Shape(info.shape),
                name=name,
            )
            self._values["weight", name] = self._tape.initializer(tensor, name)
        value = self._values["weight", name]
        if dtype is None or value.dtype == dtype:
            return value
        key = (f"cast_{dtype}", name)
        if key not in self._values:
            self._values[key] = self.op("Cast", value, to=dtype, name=f"cast({name})")
        return self._values[key]

    def linear(self, x: ir.Value, weight: str, lengths: ir.Value | None, *, bias: bool = False) -> ir.Value:
        """``x @ W^T (+ b)`` with the checkpoint tensors below `weight`, in the format they are stored in.

        Where the checkpoint has smoothing s for it, x is multiplied by s first; where it has a low-rank term, that
        is two further projections: ``W x' + B (A x')`` with ``x' = s x``, of which W alone rounds its input.
        """
        name = weight.rsplit(".", 1)[-1]
        if self.has(f"{weight}.{SMOOTHING}"):
            x = self.op("Mul", x, self.weight(f"{weight}.{SMOOTHING}", ACTIVATION), name=f"{name}_smoothing")
        kind, activation, parts = self._projection(weight)
        scale = [self.weight(f"{weight}.{INPUT_SCALE}")] if activation != "none" else []
        scales: list[ir.Value | None] = [*parts[1:], *[None] * (3 - len(parts)), *scale]
        y = self._block_linear(name, [x, parts[0], lengths, *scales], kind, activation)
        if self.has(f"{weight}.{LOW_RANK[0]}"):
            term = x
            for factor in LOW_RANK:
                stored = self.weight(f"{weight}.{factor}")
                term = self._block_linear(f"{name}_{factor}", [term, stored, lengths])
            y = self.op("Add", y, term, name=f"{name}_low_rank")
        if bias:
            y = self.op("Add", y, self.weight(f"{weight}.bias", ACTIVATION), name=f"{name}_bias")
        return y

    def _block_linear(
        self, name: str, inputs: list[ir.Value | None], kind: str = "plain", activation: str = "none"
    ) -> ir.Value:
        """One projection; optional inputs at the end that are not there are left out."""
        while inputs[-1] is None:
            inputs.pop()
        formats = {"weight_format": kind, "activation_format": activation}
        return self.call("BlockLinear", inputs, name=name, **formats)[0]

    def experts(
        self,
        x: ir.Value,
        indices: ir.Value,
        weights: ir.Value,
        lengths: ir.Value,
        prefix: str,
        count: int,
    ) -> ir.Value:
        """The routed experts ``{prefix}.0`` to ``{prefix}.{count-1}``, in the format they are stored in.

        Raises:
            CheckpointError: The experts of a layer are stored in several formats.
        """
        names = [f"{prefix}.{e}.{n}" for n in ("up_proj", "down_proj") for e in range(count)]
        stored = [self._projection(n) for n in names]
        kinds = sorted({(kind, activation) for kind, activation, _ in stored})
        if len(kinds) > 1:
            found = [f"{kind} weights, inputs rounded to {activation}" for kind, activation in kinds]
            raise CheckpointError(f"The experts {prefix}.* are stored in several formats:", found)
        kind, activation = kinds[0]
        inputs = []
        for half in (range(count), range(count, 2 * count)):
            inputs += [stored[i][2][part] for part in range(len(stored[0][2])) for i in half]
            if activation != "none":
                inputs += [self.weight(f"{names[i]}.{INPUT_SCALE}") for i in half]
        return self.call(
            "RoutedExperts",
            [x, indices, weights, lengths, *inputs],
            name="experts",
            num_experts=count,
            weight_format=kind,
            activation_format=activation,
        )[0]

    def _projection(self, prefix: str) -> tuple[str, str, list[ir.Value]]:
        """How a projection is stored: weight format, activation format, and its stored tensors."""
        stored = format_of(self._tensors[f"{prefix}.weight"].dtype)
        assert stored is not None, "the ledger has matched the dtype with a format"
        activation = stored.ACTIVATIONS if self.has(f"{prefix}.{INPUT_SCALE}") else "none"
        return stored.NAME, activation, [self.weight(f"{prefix}.{suffix}") for suffix in stored.parts((0, 0))]

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._tensors

    def rms_norm(self, x: ir.Value, weight: ir.Value, epsilon: float, name: str = "norm") -> ir.Value:
        """RMSNorm over the last axis, statistics in float32."""
        return self.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon, name=name)

    def layer_norm(self, x: ir.Value, weight: ir.Value, epsilon: float, name: str = "norm") -> ir.Value:
        """LayerNorm without bias over the last axis, statistics in float32."""
        return self.op("LayerNormalization", x, weight, axis=-1, epsilon=epsilon, name=name)

    def relu2(self, x: ir.Value) -> ir.Value:
        """relu(x)^2."""
        r = self.op("Relu", x)
        return self.op("Mul", r, r, name="square")

    def finish(self, metadata: Mapping[str, str]) -> ir.Model:
        """The model, with `metadata` as its metadata properties."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": STANDARD_OPSET, DOMAIN: OPSET_VERSION},
            name=self.name,
        )
        model = ir.Model(
            graph, ir_version=IR_VERSION, producer_name="nemo-build", functions=list(self._functions.values())
        )
        model.metadata_props.update(metadata)
        return model

    def _add(
        self,
        op_type: str,
        outputs: int,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        *,
        name: str,
        domain: str = "",
        overload: str = "",
    ) -> Sequence[ir.Value]:
        full = self._unique("/".join([*self._scope, name]))
        values = [ir.Value(name=full if outputs == 1 else f"{full}:{i}") for i in range(outputs)]
        return self._tape.op_multi_out(
            op_type, inputs, attributes or None, outputs=values, domain=domain, overload=overload, name=full
        )

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}_{count}"
