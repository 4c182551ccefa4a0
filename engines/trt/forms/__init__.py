# SPDX-License-Identifier: Apache-2.0
"""The forms in which projections lie in an engine: one module a form, found by looking in this folder.

A module defines, for a :class:`Matrix`,

- ``NAME``;
- ``MIN_SM``: the oldest GPU that has its type;
- ``fits(columns) -> bool``: whether rows of that many columns can have it;
- ``tensors(matrix, compute) -> list[Weight]``: what goes into the weights' file;
- ``emit(c, matrix, dtype) -> str``: nodes that give the weight ``[N, K]`` or ``[E, N, K]`` in an ONNX type, or with its
  last two dimensions the other way round;
- ``TURNS``: whether it can lie that way;
- ``round_input(c, x, scale) -> str``, of forms whose products round their inputs too: float32 in, float32 out.

What is stored in a format that the form keeps has its tensor-wide scales in a factor of the results: codes and block
scales multiply without loss in bfloat16, and the factor is float32.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from nemo_build.engines.lowering import ScaleWeight, StoredProjection
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.trt.phases import DECODE
from nemo_build.engines.weights import StoredTensor, Weight
from nemo_build.plugins.codecs import nvfp4 as nvfp4_codec
from nemo_build.plugins.formats import LOW_RANK

Codes = tuple[NDArray[np.uint8], NDArray[np.uint8] | None]

ONNX_TYPES = {
    "BF16": onnx.TensorProto.BFLOAT16,
    "F16": onnx.TensorProto.FLOAT16,
    "F32": onnx.TensorProto.FLOAT,
    "F8_E4M3": onnx.TensorProto.FLOAT8E4M3FN,
    "F4_E2M1": onnx.TensorProto.FLOAT4E2M1,
    "I4": onnx.TensorProto.INT4,
    "I32": onnx.TensorProto.INT32,
}
"""ONNX types of an engine's weights by name; values of F4_E2M1 and I4 are packed two a byte, the lower half first."""

COMPUTE_NAMES = {BFLOAT16: "BF16", FLOAT: "F32"}
"""Names of the types that projections multiply in."""

_STORED = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@cache
def forms() -> Mapping[str, ModuleType]:
    """All form modules by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.NAME: m for m in modules}


@dataclass(frozen=True)
class Matrix:
    """Projections of one shape as one constant.

    Attributes:
        name: The weight's name in the checkpoint, that of the first expert's apart.
        projections: One, or one an expert.
        form: Name of the form.
        stacked: Whether the constant has a dimension for experts.
        factor: Name of what results are multiplied by, float32 ``[1]`` or ``[E]``; empty for one.
        turned: Whether it lies as ``[K, N]``. A product of matrices takes it like that; the compiler would turn a
            constant that lies otherwise, in a copy that it keeps until the end.
    """

    name: str
    projections: tuple[StoredProjection, ...]
    form: str
    stacked: bool
    factor: str = ""
    turned: bool = False

    def part(self, name: str) -> str:
        """Name of one of its constants."""
        return f"{self.name}.{name}.turned" if self.turned else f"{self.name}.{name}"

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimension for experts, if there is one."""
        return (len(self.projections),) if self.stacked else ()

    @property
    def axis(self) -> int:
        """The dimension of the columns."""
        return len(self.lead) + (not self.turned)

    @property
    def rows(self) -> int:
        """Output width N of each projection."""
        return self.projections[0].rows

    @property
    def columns(self) -> int:
        """Input width K of each projection."""
        return self.projections[0].columns

    @property
    def module(self) -> ModuleType:
        """The form's module."""
        return forms()[self.form]


@dataclass(frozen=True)
class RowsWeight:
    """A tensor of the weights' file, made from pieces of rows of projections; see :class:`Weight`."""

    name: str
    dtype: str
    form: str
    matrix: Matrix
    columns: int
    bits: int
    encode: Callable[[StoredProjection, Codes, Path], NDArray[Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        """``[N, columns]``, or turned, with a dimension for experts before it if there are any."""
        sides = (self.matrix.rows, self.columns)
        return (*self.matrix.lead, *(reversed(sides) if self.matrix.turned else sides))

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return len(self.matrix.projections) * self.matrix.rows * self.columns * self.bits // 8

    def sources(self) -> Iterable[StoredTensor]:
        """The tensors of all projections."""
        return (part for p in self.matrix.projections for part in p.parts)

    def memory(self) -> int:
        """As in the file."""
        return self.nbytes

    def describe(self) -> dict[str, Any]:
        """Dtype, form and shape."""
        return {"dtype": self.dtype, "format": self.form, "shape": list(self.shape)}

    def chunks(self, folder: Path) -> Iterator[NDArray[np.uint8]]:
        """A piece of rows at a time; of a turned one, a projection."""
        for projection in self.matrix.projections:
            pieces = (
                np.ascontiguousarray(
                    self.encode(projection, projection.read_rows(folder, first, count), folder)
                )
                .reshape(-1)
                .view(np.uint8)
                for first, count in projection.row_chunks()
            )
            if not self.matrix.turned:
                yield from pieces
            else:
                yield _turn(np.concatenate(list(pieces)), self.matrix.rows, self.bits)


def _turn(rows: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint8]:
    """Bytes of a matrix of so many rows, values of so many bits, as those of its transpose."""
    if bits == 4:
        codes = np.stack([rows & 15, rows >> 4], axis=-1).reshape(count, -1).T
        return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
    values_ = rows.view(f"u{bits // 8}").reshape(count, -1)
    return np.ascontiguousarray(values_.T).reshape(-1).view(np.uint8)


class ScalarWeight(ScaleWeight):
    """A number without dimensions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """None."""
        return ()


def values(projection: StoredProjection, stored: Codes, folder: Path) -> NDArray[Any]:
    """Rows of a projection as numbers ``[rows, K]``: float32, or the dtype of a plain one."""
    codes, scales = stored
    if projection.stored_format == "plain":
        return codes.view(_STORED[projection.parts[0].dtype])
    scale = np.float32(projection.scale(folder))
    if scales is not None:
        return nvfp4_codec.decode(codes, scales, scale)
    decoded: NDArray[np.float32] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return decoded


class WeightTable:
    """The weights of an engine, as its graphs come to need them.

    Args:
        tensors: The checkpoint's tensors by name.
        sms: The GPUs that the engine is for, compute capability times ten.
        convert: Form for projections that are stored unquantized; None keeps them.
        compute: ONNX type that projections multiply in.
        rounds: Whether projections round their inputs where the checkpoint says so.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        sms: Sequence[int],
        *,
        convert: str | None = None,
        compute: int = BFLOAT16,
        rounds: bool = True,
    ) -> None:
        self.tensors = tensors
        self.weights: dict[str, Weight] = {}
        self._oldest = min(sms)
        self._convert = convert
        self._compute = compute
        self._rounds = rounds

    def matrix(
        self, name: str, projections: Sequence[StoredProjection], *, stacked: bool, multiplied: bool = False
    ) -> Matrix:
        """The constant of some projections; the same for a name that was met before.

        Args:
            name: The weight's name in the checkpoint, that of the first expert's apart.
            projections: One, or one an expert.
            stacked: Whether the constant has a dimension for experts.
            multiplied: Whether products of matrices take it, so that it had better be turned.
        """
        first = projections[0]
        form = self._form(name, first)
        turned = multiplied and forms()[form].TURNS and first.rows % 2 == 0
        is_scaled = form in ("fp8", "nvfp4")
        factor = f"{name}.{form}.factor" if is_scaled else ""
        matrix = Matrix(name, tuple(projections), form, stacked, factor, turned)
        added: list[Weight] = matrix.module.tensors(matrix, self._compute)
        if is_scaled:
            scale = getattr(matrix.module, "factor", StoredProjection.scale)
            sources = tuple(part for p in projections for part in p.parts)
            added.append(
                ScaleWeight(
                    factor, len(projections), sources, lambda folder: [scale(p, folder) for p in projections]
                )
            )
        for weight in added:
            self.weights.setdefault(weight.name, weight)
        return matrix

    def largest(self, name: str, scales: Sequence[StoredTensor]) -> str:
        """A scalar, the largest of some stored numbers."""
        tensors = tuple(scales)
        weight = ScalarWeight(name, 1, tensors, lambda folder: [max(t.read_number(folder) for t in tensors)])
        self.weights.setdefault(name, weight)
        return name

    def rounds(self, matrix: Matrix) -> bool:
        """Whether products with the matrix can round their input as the checkpoint says."""
        return self._rounds and matrix.form == matrix.projections[0].stored_format != "plain"

    def multiply(self, c: Context, x: str, matrix: Matrix, input_scale: str = "") -> str:
        """``x @ W^T`` in float32, of `x` float32 ``[..., K]``; `input_scale` is what `x` is rounded with, if at all."""

        def columns(dtype: int) -> str:
            weight: str = matrix.module.emit(c, matrix, dtype)
            return (
                weight if matrix.turned else c.g.transpose(weight, *((0, 2, 1) if matrix.stacked else (1, 0)))
            )

        if input_scale and self.rounds(matrix):
            y = c.g.op("MatMul", matrix.module.round_input(c, x, input_scale), columns(FLOAT))
        elif matrix.form == "nvfp4" and c.phase.name == DECODE:
            # A product of matrices would decode the whole weight into memory in every step; this is one kernel.
            weight = c.to_float(matrix.module.emit(c, matrix, c.compute))
            products = c.g.op("Mul", c.g.unsqueeze(x, -2), weight)
            y = c.g.op("ReduceSum", products, c.g.ints(-1), keepdims=0)
        else:
            y = c.to_float(c.g.op("MatMul", c.to_compute(x), columns(c.compute)))
        if not matrix.factor:
            return y
        factor = c.g.reshape(matrix.factor, -1, 1, 1) if matrix.stacked else matrix.factor
        return c.g.op("Mul", y, factor)

    def _form(self, name: str, first: StoredProjection) -> str:
        """The form that a projection gets: as stored if the GPUs have the type, else the nearest they have."""
        wanted = first.stored_format
        if wanted == "plain" and self._convert and not name.endswith(LOW_RANK):
            wanted = self._convert
        for form in (wanted, "int4") if wanted == "nvfp4" else (wanted,):
            module = forms()[form]
            if self._oldest >= module.MIN_SM and module.fits(first.columns):
                return form
        return "plain"
