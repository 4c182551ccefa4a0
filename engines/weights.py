# SPDX-License-Identifier: Apache-2.0
"""Packing of a model bundle's weights into one file of an engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from nemo_build.bundle import Progress
from nemo_build.errors import BundleError
from nemo_build.export.graph import DTYPES

ALIGNMENT = 64
"""Bytes; a cache line, and the width of the widest vector registers."""

_CHUNK = 1 << 22

_DTYPE_NAMES = {int(value): name for name, value in DTYPES.items()}


@dataclass(frozen=True)
class PackedWeight:
    """Where a weight comes from and where it lies in the packed file; dtype by its safetensors name.

    Offsets and sizes are in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    source_offset: int
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Values it holds; a byte of packed NVFP4 holds two."""
        return math.prod(self.shape) * (2 if self.dtype == "U8" else 1)

    def to_json(self) -> dict[str, Any]:
        """What the engine's manifest says of it."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "offset": self.offset,
            "nbytes": self.nbytes,
        }


def external_entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """External-data fields of a tensor; empty if its data are inside the model."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return {}
    return {e.key: e.value for e in tensor.external_data}


def lay_out(models: Iterable[onnx.ModelProto]) -> list[PackedWeight]:
    """Give every external weight of the models a place, in order of first use, each one once."""
    placed: dict[str, PackedWeight] = {}
    offset = 0
    for model in models:
        for tensor in model.graph.initializer:
            entries = external_entries(tensor)
            if not entries:
                continue
            source, start, length = entries["location"], int(entries["offset"]), int(entries["length"])
            known = placed.get(tensor.name)
            if known is not None:
                if (known.source, known.source_offset, known.nbytes) != (source, start, length):
                    raise ValueError(f"{tensor.name} is two different weights in the graphs of one engine")
                continue
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            dtype = _DTYPE_NAMES[tensor.data_type]
            placed[tensor.name] = PackedWeight(
                tensor.name, dtype, tuple(tensor.dims), source, start, offset, length
            )
            offset += length
    return list(placed.values())


def write_packed(
    weights: Iterable[PackedWeight], folder: Path, out: Path, progress: Progress | None = None
) -> str:
    """Copy the weights from `folder` to the packed file; returns its sha256. Memory: one chunk.

    Raises:
        BundleError: A file has become shorter.
    """
    digest = hashlib.sha256()
    position = 0
    with open(out, "wb") as target:
        for weight in weights:
            padding = b"\0" * (weight.offset - position)
            target.write(padding)
            digest.update(padding)
            with open(folder / weight.source, "rb") as source:
                source.seek(weight.source_offset)
                left = weight.nbytes
                while left:
                    chunk = source.read(min(left, _CHUNK))
                    if not chunk:
                        raise BundleError(
                            f"{folder / weight.source} ends within {weight.name}.", hint="Export it again."
                        )
                    target.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
                    if progress:
                        progress(len(chunk))
            position = weight.offset + weight.nbytes
    return digest.hexdigest()


def point_at(model: onnx.ModelProto, weights: Iterable[PackedWeight], location: str) -> None:
    """Make the model's external weights refer to the packed file."""
    by_name = {w.name: w for w in weights}
    for tensor in model.graph.initializer:
        if external_entries(tensor):
            weight = by_name[tensor.name]
            del tensor.external_data[:]
            for key, value in (("location", location), ("offset", weight.offset), ("length", weight.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
