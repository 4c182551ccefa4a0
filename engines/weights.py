# SPDX-License-Identifier: Apache-2.0
"""Packing of a model bundle's weights into one file of an engine."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx

from nemo_build.bundle import Progress
from nemo_build.errors import BundleError
from nemo_build.export.graph import DTYPES

ALIGNMENT = 64
"""Bytes; a cache line, and the width of the widest vector registers."""

_CHUNK = 1 << 22

_DTYPE_NAMES = {int(value): name for name, value in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of the checkpoint; dtype by its safetensors name, offset and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    offset: int
    nbytes: int

    @classmethod
    def of(cls, tensor: onnx.TensorProto) -> StoredTensor:
        """What an external initializer of a model bundle refers to."""
        entries = external_entries(tensor)
        dtype, shape = _DTYPE_NAMES[tensor.data_type], tuple(tensor.dims)
        offset, length = int(entries["offset"]), int(entries["length"])
        return cls(tensor.name, dtype, shape, entries["location"], offset, length)

    def read(self, folder: Path, start: int = 0, count: int | None = None) -> bytes:
        """`count` of its bytes from `start`. Raises BundleError if the file has become shorter."""
        count = self.nbytes - start if count is None else count
        with open(folder / self.source, "rb") as file:
            file.seek(self.offset + start)
            data = file.read(count)
        if len(data) != count:
            raise BundleError(f"{folder / self.source} ends within {self.name}.", hint="Export it again.")
        return data

    def read_number(self, folder: Path) -> float:
        """Its value, of a tensor that is one float32 number."""
        (value,) = struct.unpack("<f", self.read(folder))
        return float(value)


class Weight(Protocol):
    """A tensor of an engine's weights file.

    Attributes:
        name: Name of the initializer.
        dtype: Safetensors name of the dtype.
        shape: Shape of the initializer.
        nbytes: Size in the file.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...

    def sources(self) -> Iterable[StoredTensor]:
        """The checkpoint's tensors that it is made of."""
        ...

    def chunks(self, folder: Path) -> Iterator[Any]:
        """Its contents, piece by piece: buffers of bounded size."""
        ...

    def memory(self) -> int:
        """Bytes it takes in memory at run time."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the engine's manifest says of it, its place apart."""
        ...


@dataclass(frozen=True)
class CopiedWeight:
    """A tensor whose bytes are the checkpoint's.

    Attributes:
        tensor: The checkpoint's tensor.
        gathered: Whether rows of it are looked up as they are stored. ONNX Runtime keeps a float32 copy of any
            other, in which it computes.
    """

    tensor: StoredTensor
    gathered: bool

    @property
    def name(self) -> str:
        """The initializer's and the tensor's name."""
        return self.tensor.name

    @property
    def dtype(self) -> str:
        """As stored."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """As stored."""
        return self.tensor.nbytes

    def sources(self) -> Iterable[StoredTensor]:
        """The tensor."""
        return (self.tensor,)

    def chunks(self, folder: Path) -> Iterator[bytes]:
        """Its bytes."""
        for start in range(0, self.nbytes, _CHUNK):
            yield self.tensor.read(folder, start, min(_CHUNK, self.nbytes - start))

    def memory(self) -> int:
        """As stored if it is looked up, else four bytes a value; a byte of packed NVFP4 holds two."""
        return self.nbytes if self.gathered else 4 * math.prod(self.shape) * (2 if self.dtype == "U8" else 1)

    def describe(self) -> dict[str, Any]:
        """Dtype and shape."""
        return {"dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True)
class PlacedWeight:
    """A weight and its offset in the file, in bytes."""

    weight: Weight
    offset: int

    def to_json(self) -> dict[str, Any]:
        """What the engine's manifest says of it."""
        return {**self.weight.describe(), "offset": self.offset, "nbytes": self.weight.nbytes}


def external_entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """External-data fields of a tensor; empty if its data are inside the model."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return {}
    return {e.key: e.value for e in tensor.external_data}


def stored_tensors(
    models: Iterable[onnx.ModelProto], besides: Container[str] = ()
) -> dict[str, StoredTensor]:
    """The checkpoint's tensors that the models refer to, by name, in order of first use."""
    found: dict[str, StoredTensor] = {}
    for model in models:
        for tensor in model.graph.initializer:
            if external_entries(tensor) and tensor.name not in besides:
                stored = StoredTensor.of(tensor)
                if found.setdefault(tensor.name, stored) != stored:
                    raise ValueError(f"{tensor.name} is two different weights in the graphs of one engine")
    return found


def copied_weights(
    models: Iterable[onnx.ModelProto], besides: Container[str] = ()
) -> dict[str, CopiedWeight]:
    """The external initializers of the models that are the checkpoint's tensors: all but those in `besides`."""
    models = list(models)
    gathered = {n.input[0] for m in models for n in m.graph.node if n.op_type == "Gather"}
    elsewhere = {i for m in models for n in m.graph.node if n.op_type != "Gather" for i in n.input}
    return {
        name: CopiedWeight(tensor, name in gathered - elsewhere)
        for name, tensor in stored_tensors(models, besides).items()
    }


def place(weights: Iterable[Weight], alignment: int = ALIGNMENT) -> list[PlacedWeight]:
    """Give every weight a place in the file at a multiple of `alignment` bytes, in the order given."""
    placed = []
    offset = 0
    for weight in weights:
        offset = -(-offset // alignment) * alignment
        placed.append(PlacedWeight(weight, offset))
        offset += weight.nbytes
    return placed


def write_packed(
    weights: Iterable[PlacedWeight], folder: Path, out: Path, progress: Progress | None = None
) -> str:
    """Write the weights file from the checkpoint's files in `folder`; returns its sha256. Memory: one chunk.

    Raises:
        BundleError: A file has become shorter.
    """
    digest = hashlib.sha256()
    position = 0
    with open(out, "wb") as target:
        for placed in weights:
            padding = b"\0" * (placed.offset - position)
            target.write(padding)
            digest.update(padding)
            for chunk in placed.weight.chunks(folder):
                target.write(chunk)
                digest.update(chunk)
                if progress:
                    progress(len(chunk))
            position = placed.offset + placed.weight.nbytes
    return digest.hexdigest()


def point_at(model: onnx.ModelProto, weights: Iterable[PlacedWeight], location: str) -> None:
    """Make the model's external weights refer to the packed file."""
    by_name = {w.weight.name: w for w in weights}
    for tensor in model.graph.initializer:
        if external_entries(tensor):
            placed = by_name[tensor.name]
            del tensor.external_data[:]
            entries = (("location", location), ("offset", placed.offset), ("length", placed.weight.nbytes))
            for key, value in entries:
                tensor.external_data.add(key=key, value=str(value))
