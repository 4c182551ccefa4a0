# SPDX-License-Identifier: Apache-2.0
"""The weights of engines with kernels of our own, each an input of the graphs that use it.

A session binds them to places in one allocation that holds the weights' file, so graphs hold none of them and share
them all. Codes of 8 and 4 bits and block scales travel as flat 32-bit words: whatever a backend makes of such types,
it has to pass the address on, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.lowering import ScaleWeight, StoredProjection
from nemo_build.engines.trt.emitter import BFLOAT16
from nemo_build.engines.trt.forms import WeightTable, plain
from nemo_build.engines.weights import CopiedWeight, StoredTensor, Weight

ALIGNMENT = 256
"""Bytes between possible places of weights in the file; CUDA's own allocations begin at such addresses."""

_CHUNK = 1 << 24
_NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True)
class WordsWeight:
    """A stored tensor of each of some projections, one after the other, as 32-bit words; see ``Weight``.

    Attributes:
        name: Name of the graphs' input.
        projections: One, or one an expert.
        part: Which of a projection's tensors: 0 for codes, 1 for block scales.
    """

    name: str
    projections: tuple[StoredProjection, ...]
    part: int

    dtype = "I32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Words; the last is filled up with zeros."""
        return (-(-sum(t.nbytes for t in self.sources()) // 4),)

    @property
    def nbytes(self) -> int:
        """Four bytes a word."""
        return 4 * self.shape[0]

    def sources(self) -> Iterable[StoredTensor]:
        """The tensors, in order."""
        return (p.parts[self.part] for p in self.projections)

    def memory(self) -> int:
        """As in the file."""
        return self.nbytes

    def describe(self) -> dict[str, Any]:
        """Dtype, the format that the bytes are in, and shape."""
        return {"dtype": self.dtype, "format": self.projections[0].stored_format, "shape": list(self.shape)}

    def chunks(self, folder: Path) -> Iterator[bytes]:
        """The checkpoint's own bytes, a piece of a tensor at a time."""
        total = 0
        for tensor in self.sources():
            for start in range(0, tensor.nbytes, _CHUNK):
                yield tensor.read(folder, start, min(_CHUNK, tensor.nbytes - start))
            total += tensor.nbytes
        yield b"\0" * (self.nbytes - total)


@dataclass(frozen=True)
class FloatWeight:
    """A small tensor of the checkpoint in float32, in which it is computed with; see ``Weight``."""

    tensor: StoredTensor

    dtype = "F32"

    @property
    def name(self) -> str:
        """The tensor's name and the type."""
        return f"{self.tensor.name}.float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """Four bytes a number."""
        return 4 * math.prod(self.shape)

    def sources(self) -> Iterable[StoredTensor]:
        """The tensor."""
        return (self.tensor,)

    def memory(self) -> int:
        """As in the file."""
        return self.nbytes

    def describe(self) -> dict[str, Any]:
        """Dtype and shape."""
        return {"dtype": self.dtype, "shape": list(self.shape)}

    def chunks(self, folder: Path) -> Iterator[NDArray[np.float32]]:
        """A piece at a time."""
        kind = _NUMPY[self.tensor.dtype]
        for start in range(0, self.tensor.nbytes, _CHUNK):
            data = self.tensor.read(folder, start, min(_CHUNK, self.tensor.nbytes - start))
            yield np.frombuffer(data, kind).astype(np.float32)


class KernelWeights(WeightTable):
    """The weights of an engine, as its graphs come to need them; all phases and graphs of an engine share one.

    Args:
        tensors: The checkpoint's tensors by name.
        compute: ONNX type of activations, and of plain projections.
        rounds: Whether projections round their inputs where the checkpoint says so.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], *, compute: int = BFLOAT16, rounds: bool = True
    ) -> None:
        super().__init__(tensors, (80,), compute=compute, rounds=rounds)
        self.compute = compute
        self.keeps_rounding = rounds

    def stored(self, name: str, projections: Sequence[StoredProjection], *, stacked: bool) -> dict[str, str]:
        """The inputs that hold some projections, by the parameters of kernels: ``weight`` and its scales.

        Args:
            name: The weight's name in the checkpoint, that of the first expert's apart.
            projections: One, or one an expert, all in one format.
            stacked: Whether a plain weight has a dimension for experts.
        """
        form, all_of_them = projections[0].stored_format, tuple(projections)
        if form == "plain":
            matrix = self.matrix(name, projections, stacked=stacked)
            return {"weight": plain.tensors(matrix, self.compute)[0].name}
        codes = self._add(WordsWeight(f"{name}.{form}.codes", all_of_them, 0))
        factor = self._add(
            ScaleWeight(
                f"{name}.{form}.factor",
                len(projections),
                tuple(p.parts[-1] for p in projections),
                lambda folder: [p.scale(folder) for p in all_of_them],
            )
        )
        if form == "fp8":
            return {"weight": codes, "weight_scale": factor}
        scales = self._add(WordsWeight(f"{name}.{form}.scales", all_of_them, 1))
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}

    def numbers(self, name: str, scalars: Sequence[StoredTensor]) -> str:
        """An input that holds stored numbers, float32 ``[len(scalars)]``."""
        tensors = tuple(scalars)
        return self._add(
            ScaleWeight(name, len(tensors), tensors, lambda folder: [t.read_number(folder) for t in tensors])
        )

    def float32(self, name: str) -> str:
        """An input that holds a stored tensor in float32."""
        tensor = self.tensors[name]
        return self._add(
            CopiedWeight(tensor, gathered=True) if tensor.dtype == "F32" else FloatWeight(tensor)
        )

    def _add(self, weight: Weight) -> str:
        self.weights.setdefault(weight.name, weight)
        return weight.name
