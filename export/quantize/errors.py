# SPDX-License-Identifier: Apache-2.0
"""How far the stored weights of a quantized checkpoint are from their originals.

A low-rank term beside a weight and the smoothing of its input are part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.export.checkpoint import Checkpoint, TensorInfo
from nemo_build.export.quantize.recipe import Assignment
from nemo_build.export.quantize.streaming import DTYPES
from nemo_build.plugins.formats import LOW_RANK, SMOOTHING, formats

SAMPLED_ROWS = 64

_STORED: Mapping[str, Any] = {**DTYPES, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}


@dataclass(frozen=True)
class WeightError:
    """The error of one weight, on evenly spaced rows.

    Attributes:
        rmse: Root of the mean squared error.
        sqnr: Signal over error, in dB; ``None`` for an exact weight.
    """

    rmse: float
    sqnr: float | None


def weight_errors(
    original: Checkpoint, quantized: Checkpoint, assignments: Mapping[str, Assignment]
) -> dict[str, WeightError]:
    """The error of every quantized projection."""
    return {module: _error(original, quantized, module, a) for module, a in assignments.items()}


def block_scales(quantized: Checkpoint, assignments: Mapping[str, Assignment]) -> dict[int, int]:
    """Block scales of all NVFP4 weights: how many by binary exponent, in ascending order."""
    counts = np.zeros(256, np.int64)
    for module, assignment in assignments.items():
        if assignment.format == "nvfp4":
            counts += np.bincount(
                _rows(quantized, f"{module}.weight_scale").reshape(-1).view(np.uint8), minlength=256
            )
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found: dict[int, int] = {}
    for value, count in zip(values, counts, strict=True):
        if count and value > 0:
            exponent = math.floor(math.log2(value))
            found[exponent] = found.get(exponent, 0) + int(count)
    return dict(sorted(found.items()))


def _error(original: Checkpoint, quantized: Checkpoint, module: str, assignment: Assignment) -> WeightError:
    count = original.tensors[f"{module}.weight"].shape[0]
    sample = slice(None, None, -(-count // SAMPLED_ROWS))
    want = _rows(original, f"{module}.weight")[sample].astype(np.float32)
    parts = []
    for suffix, part in formats()[assignment.format].parts((0, 0)).items():
        stored = _rows(quantized, f"{module}.{suffix}")
        parts.append(stored if part.shape == () else stored[sample])
    weight = formats()[assignment.format].decode(*parts)
    if assignment.rank:
        a, b = (_rows(quantized, f"{module}.{factor}").astype(np.float32) for factor in LOW_RANK)
        weight = weight + b[sample] @ a
    if f"{module}.{SMOOTHING}" in quantized.tensors:
        weight = weight * _rows(quantized, f"{module}.{SMOOTHING}").astype(np.float32)
    difference = weight - want
    noise = float(np.square(difference, dtype=np.float64).mean())
    signal = float(np.square(want, dtype=np.float64).mean())
    sqnr = 10 * math.log10(signal / noise) if noise and signal else None
    return WeightError(math.sqrt(noise), sqnr)


def _rows(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """A tensor, mapped: only what is used is read."""
    info: TensorInfo = checkpoint.tensors[name]
    if not info.shape:
        with open(checkpoint.files[info.file].path_real, "rb") as file:
            file.seek(info.offset)
            return np.frombuffer(file.read(info.nbytes), _STORED[info.dtype]).reshape(())
    path = checkpoint.files[info.file].path_real
    return np.memmap(path, _STORED[info.dtype], "r", info.offset, info.shape)
