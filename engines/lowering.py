# SPDX-License-Identifier: Apache-2.0
"""Lowering of a portable graph for the CPU kernels: projections get weights in panels.

``nemo::BlockLinear`` and ``nemo::RoutedExperts`` become the ops of the same names in the domain ``nemo.cpu``, whose
weights are laid out in panels (:mod:`nemo_build.plugins.panels`), all experts of a projection in one tensor. The
other ops of the ``nemo`` domain keep their inputs; the reference functions go, since nothing could run the lowered
graph without the native kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from nemo_build.engines.weights import StoredTensor, Weight, stored_tensors
from nemo_build.errors import CheckpointError
from nemo_build.export.graph import DTYPES
from nemo_build.plugins import panels
from nemo_build.plugins.codecs import int_blocks, nvfp4
from nemo_build.plugins.formats import LOW_RANK, format_of
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION

CPU_DOMAIN = "nemo.cpu"
"""Domain of the lowered ops."""

_CHUNK = 1 << 24  # bytes of stored codes at a time
_NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_PLAIN = {"BF16": "bf16", "F16": "f16", "F32": "f32"}

Codes = tuple[NDArray[np.uint8], NDArray[np.uint8] | None]


@dataclass(frozen=True)
class StoredProjection:
    """One projection ``[rows, columns]`` as the checkpoint stores it: its parts in order, ``weight`` first."""

    parts: tuple[StoredTensor, ...]
    stored_format: str
    rows: int
    columns: int

    @classmethod
    def of(cls, parts: Sequence[StoredTensor]) -> StoredProjection:
        """From the stored tensors."""
        stored = format_of(parts[0].dtype)
        assert stored is not None, "the ledger has matched the dtype with a format"
        rows, columns = parts[0].shape
        return cls(tuple(parts), stored.NAME, rows, columns * (2 if stored.NAME == "nvfp4" else 1))

    @property
    def source_format(self) -> str:
        """The panel format that takes the stored codes as they are."""
        return _PLAIN[self.parts[0].dtype] if self.stored_format == "plain" else self.stored_format

    def scale(self, folder: Path) -> float:
        """The scale of the whole tensor; 1 for a plain one."""
        if self.stored_format == "plain":
            return 1.0
        return self.parts[-1].read_number(folder)

    def read_rows(self, folder: Path, first: int, count: int) -> Codes:
        """Stored codes and block scales of some rows, as bytes."""

        def rows_of(part: StoredTensor) -> NDArray[np.uint8]:
            row = part.nbytes // self.rows
            data = part.read(folder, first * row, count * row)
            return np.frombuffer(data, np.uint8).reshape(count, row)

        scales = rows_of(self.parts[1]) if self.stored_format == "nvfp4" else None
        return rows_of(self.parts[0]), scales

    def row_chunks(self) -> Iterator[tuple[int, int]]:
        """First row and number of rows of pieces of bounded size, in whole panels."""
        row = max(self.parts[0].nbytes // self.rows, 1)
        step = max(_CHUNK // row // panels.ROWS, 1) * panels.ROWS
        for first in range(0, self.rows, step):
            yield first, min(step, self.rows - first)


@dataclass(frozen=True)
class PanelWeight:
    """Projections of one shape, one after the other, in panels.

    Attributes:
        name: Name of the initializer.
        projections: One, or one an expert.
        form: Format of the panels; differs from the stored one if the build converts it.
        stacked: Whether the shape has a dimension for experts.
    """

    name: str
    projections: tuple[StoredProjection, ...]
    form: panels.PanelFormat
    stacked: bool
    _amaxes: dict[StoredProjection, float] = field(default_factory=dict, compare=False, repr=False)

    dtype = "U8"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the initializer: bytes."""
        first = self.projections[0]
        each = self.form.nbytes(first.rows, first.columns)
        return (len(self.projections), each) if self.stacked else (each,)

    @property
    def nbytes(self) -> int:
        """Bytes of all panels."""
        return math.prod(self.shape)

    def sources(self) -> Iterable[StoredTensor]:
        """The tensors of all projections."""
        return (part for p in self.projections for part in p.parts)

    def memory(self) -> int:
        """As on disk: the file is mapped."""
        return self.nbytes

    def describe(self) -> dict[str, Any]:
        """Format and shape of the weights."""
        first = self.projections[0]
        shape = [len(self.projections)] if self.stacked else []
        return {
            "dtype": self.dtype,
            "format": self.form.name,
            "layout": "panels",
            "shape": [*shape, first.rows, first.columns],
        }

    def chunks(self, folder: Path) -> Iterator[NDArray[np.uint8]]:
        """Panels of a chunk of rows at a time."""
        for projection in self.projections:
            amax = self._amax(projection, folder) if self._scales_whole(projection) else 0.0
            for first, count in projection.row_chunks():
                codes, scales = self._encode(projection, projection.read_rows(folder, first, count), amax)
                yield panels.pack(self.form, projection.columns, codes, scales)

    def scale(self, projection: StoredProjection, folder: Path) -> float:
        """What results of a projection are multiplied by."""
        if not self._scales_whole(projection):
            return projection.scale(folder)
        nothing = np.zeros((1, nvfp4.BLOCK), np.float32)
        return float(nvfp4.encode(nothing, four_over_six=True, amax=self._amax(projection, folder)).scale_2)

    def _scales_whole(self, projection: StoredProjection) -> bool:
        """Whether the build makes a scale for the whole tensor."""
        return self.form.name == "nvfp4" and projection.source_format != "nvfp4"

    def _amax(self, projection: StoredProjection, folder: Path) -> float:
        """The largest magnitude of an unquantized projection, which is read once more for that."""
        if projection not in self._amaxes:
            pieces = (
                _values(projection, projection.read_rows(folder, *c)[0]) for c in projection.row_chunks()
            )
            self._amaxes[projection] = max(float(np.abs(p.astype(np.float32)).max()) for p in pieces)
        return self._amaxes[projection]

    def _encode(self, projection: StoredProjection, stored: Codes, amax: float) -> Codes:
        """Codes and block scales in the panels' format."""
        if self.form.name == projection.source_format:
            return stored
        weight = _values(projection, stored[0])
        try:
            if self.form.name == "nvfp4":
                encoded = nvfp4.encode(weight, four_over_six=True, amax=amax)
                return encoded.codes, encoded.scales
            return _ENCODERS[self.form.name](weight)
        except ValueError as error:
            name = projection.parts[0].name
            raise CheckpointError(f"{name} cannot be converted to {self.form.name}: {error}.") from error


@dataclass(frozen=True)
class ScaleWeight:
    """A float32 number for each projection: `values` reads or computes them from the checkpoint's folder."""

    name: str
    count: int
    tensors: tuple[StoredTensor, ...]
    values: Callable[[Path], list[float]]

    dtype = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """One number a projection."""
        return (self.count,)

    @property
    def nbytes(self) -> int:
        """Four bytes a number."""
        return 4 * self.count

    def sources(self) -> Iterable[StoredTensor]:
        """The tensors the numbers come from."""
        return self.tensors

    def memory(self) -> int:
        """As on disk."""
        return self.nbytes

    def describe(self) -> dict[str, Any]:
        """Dtype and shape."""
        return {"dtype": self.dtype, "shape": list(self.shape)}

    def chunks(self, folder: Path) -> Iterator[bytes]:
        """The numbers."""
        yield np.array(self.values(folder), np.float32).tobytes()


def lower(models: Iterable[onnx.ModelProto], *, precision: str, convert: str | None) -> dict[str, Weight]:
    """Lower the graphs, in place.

    Args:
        models: The graphs of one engine, with the checkpoint's tensors as external initializers.
        precision: What projections round their inputs to: ``float32``, ``bfloat16`` or ``int8``.
        convert: A name of :data:`~nemo_build.engines.options.CONVERSIONS` for projections that are stored
            unquantized, low-rank terms beside quantized ones apart; None keeps them.

    Returns:
        The new initializers by name. Their external data are still to be pointed at.
    """
    models = list(models)
    tensors = stored_tensors(models)
    lowering = _Lowering(tensors, precision, convert)
    for model in models:
        added: dict[str, Weight] = {}
        for node in model.graph.node:
            if node.domain == DOMAIN:
                node.overload = ""
                if node.op_type in _LOWERED:
                    added |= {w.name: w for w in _LOWERED[node.op_type](lowering, node)}
        used = {name for node in model.graph.node for name in node.input}
        kept = [t for t in model.graph.initializer if t.name in used]
        del model.graph.initializer[:]
        model.graph.initializer.extend([*kept, *map(_placeholder, added.values())])
        del model.functions[:]
        model.opset_import.add(domain=CPU_DOMAIN, version=OPSET_VERSION)
    return lowering.weights


def set_precision(model: onnx.ModelProto, precision: str) -> None:
    """Make the native kernels of a graph that is not lowered round projections' inputs to `precision`."""
    if precision == "float32":
        return  # what a node without the attribute means
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in _LOWERED:
            node.attribute.append(onnx.helper.make_attribute("precision", precision))


class _Lowering:
    """The weights made so far, and the lowering of each op."""

    def __init__(self, tensors: Mapping[str, StoredTensor], precision: str, convert: str | None) -> None:
        self.weights: dict[str, Weight] = {}
        self._tensors = tensors
        self._precision = precision
        self._convert = convert

    def block_linear(self, node: onnx.NodeProto) -> list[Weight]:
        """Inputs become x, panels, lengths, weight scale, input scale."""
        inputs = [*node.input, *[""] * (6 - len(node.input))]
        parts = [self._tensors[name] for name in (inputs[1], inputs[3], inputs[4]) if name]
        input_scales = [self._tensors[inputs[5]]] if inputs[5] else []
        added = self._panels(inputs[1], [StoredProjection.of(parts)], input_scales, stacked=False)
        names = [w.name if w else "" for w in added]
        first = added[0].projections[0]
        _replace(node, [inputs[0], names[0], inputs[2], *names[1:]])
        self._attributes(node, added[0], rows=first.rows, columns=first.columns)
        return [w for w in added if w]

    def routed_experts(self, node: onnx.NodeProto) -> list[Weight]:
        """Inputs become x, indices, weights, lengths, panels of up and down, their scales, their input scales."""
        count = next(a.i for a in node.attribute if a.name == "num_experts")
        names = node.input[4:]
        halves = [names[: len(names) // 2], names[len(names) // 2 :]]
        added = []
        for half in halves:
            columns = [half[i : i + count] for i in range(0, len(half), count)]
            rounded = any(a.name == "activation_format" and a.s != b"none" for a in node.attribute)
            parts = columns[:-1] if rounded else columns
            projections = [
                StoredProjection.of([self._tensors[column[e]] for column in parts]) for e in range(count)
            ]
            input_scales = [self._tensors[n] for n in columns[-1]] if rounded else []
            name = columns[0][0].replace(".experts.0.", ".experts.")
            added.append(self._panels(name, projections, input_scales, stacked=True))
        ordered = [w.name if w else "" for pair in zip(*added, strict=True) for w in pair]
        up = added[0][0].projections[0]
        _replace(node, [*node.input[:4], *ordered])
        self._attributes(node, added[0][0], width=up.columns, inner=up.rows)
        return [w for half in added for w in half if w]

    def _panels(
        self,
        name: str,
        projections: list[StoredProjection],
        input_scales: list[StoredTensor],
        *,
        stacked: bool,
    ) -> tuple[PanelWeight, ScaleWeight | None, ScaleWeight | None]:
        """Panels, their scales and input scales; the same for a weight that was met before."""
        source = projections[0].source_format
        # A low-rank term is what the rounding of its weight would lose; it stays as it is, like that weight.
        convertible = projections[0].stored_format == "plain" and not name.endswith(LOW_RANK)
        form = panels.FORMATS[self._convert if self._convert and convertible else source]
        weight = PanelWeight(f"{name}.panels", tuple(projections), form, stacked)
        scale = None
        if form.name in ("nvfp4", "fp8"):
            scale = ScaleWeight(
                f"{name}.panel_scale",
                len(projections),
                tuple(weight.sources()),
                lambda folder: [weight.scale(p, folder) for p in projections],
            )
        rounding = None
        if input_scales:
            rounding = ScaleWeight(
                f"{name}.panel_input_scale",
                len(projections),
                tuple(input_scales),
                lambda folder: [t.read_number(folder) for t in input_scales],
            )
        for w in (weight, scale, rounding):
            if w is not None:
                self.weights.setdefault(w.name, w)
        return weight, scale, rounding

    def _attributes(self, node: onnx.NodeProto, weight: PanelWeight, **sizes: int) -> None:
        kept = [a for a in node.attribute if a.name != "weight_format"]
        del node.attribute[:]
        node.attribute.extend(kept)
        attributes = {"weight_format": weight.form.name, "precision": self._precision, **sizes}
        node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items())


def _replace(node: onnx.NodeProto, inputs: list[str]) -> None:
    """Give a node the lowered op's domain and inputs."""
    while not inputs[-1]:
        inputs.pop()
    del node.input[:]
    node.input.extend(inputs)
    node.domain = CPU_DOMAIN


def _placeholder(weight: Weight) -> onnx.TensorProto:
    """An external initializer whose place is not known yet."""
    tensor = onnx.TensorProto(name=weight.name, data_type=int(DTYPES[weight.dtype]), dims=weight.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="")
    return tensor


def _values(projection: StoredProjection, codes: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows of an unquantized projection in the dtype they are stored in."""
    return codes.view(_NUMPY[projection.parts[0].dtype])


_ENCODERS: Mapping[str, Callable[[NDArray[Any]], Codes]] = {
    "bf16": lambda weight: (weight.astype(ml_dtypes.bfloat16).view(np.uint8), None),
    "int8": int_blocks.encode_int8,
    "int4": int_blocks.encode_int4,
}

_LOWERED: Mapping[str, Callable[[_Lowering, onnx.NodeProto], list[Weight]]] = {
    "BlockLinear": _Lowering.block_linear,
    "RoutedExperts": _Lowering.routed_experts,
}
