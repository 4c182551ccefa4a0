# SPDX-License-Identifier: Apache-2.0
"""INT4 codes with a scale for each 64 or 32 along a row, for GPUs without FP4.

The compiler wants scales above zero, so codes are symmetric, -7 to 7, and a block of zeros has the scale one; value =
code * scale, with the scale in the type that is multiplied in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.forms import COMPUTE_NAMES, Codes, Matrix, RowsWeight, values
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.weights import Weight
from nemo_build.errors import CheckpointError

NAME = "int4"
MIN_SM = 80
TURNS = True

_BLOCKS = (64, 32)
_LARGEST = np.float32(7)
_NUMPY: dict[str, tuple[Any, int]] = {"BF16": (ml_dtypes.bfloat16, 16), "F32": (np.float32, 32)}


def fits(columns: int) -> bool:
    """Whole blocks of one of the sizes."""
    return any(columns % size == 0 for size in _BLOCKS)


def block_of(columns: int) -> int:
    """Columns that share a scale."""
    return next(size for size in _BLOCKS if columns % size == 0)


def encode(weight: NDArray[Any], block: int, scale_type: Any) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Codes uint8 ``[N, K/2]``, two a byte, and scales ``[N, K/block]`` of a weight ``[N, K]``.

    Codes are the nearest for the scale as it is stored. Raises ValueError for values that are NaN or infinite.
    """
    numbers = weight.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{int((~np.isfinite(numbers)).sum())} values are NaN or infinite")
    blocks = numbers.reshape(len(numbers), -1, block)
    scales = (np.abs(blocks).max(axis=-1) / _LARGEST).astype(scale_type)
    scales = np.where(scales == 0, np.ones((), scale_type), scales)
    codes = np.clip(np.rint(blocks / scales.astype(np.float32)[..., None]), -_LARGEST, _LARGEST)
    nibbles = codes.astype(np.int8).view(np.uint8).reshape(len(numbers), -1) & 15
    packed: NDArray[np.uint8] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed, scales


def tensors(matrix: Matrix, compute: int) -> list[Weight]:
    """Codes and scales; whatever is stored is decoded first."""
    dtype = COMPUTE_NAMES[compute]
    kind, bits = _NUMPY[dtype]
    block = block_of(matrix.columns)

    def part(index: int) -> Any:
        def encode_rows(projection: StoredProjection, stored: Codes, folder: Path) -> NDArray[Any]:
            try:
                return encode(values(projection, stored, folder), block, kind)[index]
            except ValueError as error:
                name = projection.parts[0].name
                raise CheckpointError(f"{name} cannot be converted to int4: {error}.") from error

        return encode_rows

    columns = matrix.columns
    return [
        RowsWeight(matrix.part("int4.codes"), "I4", NAME, matrix, columns, 4, part(0)),
        RowsWeight(matrix.part("int4.scales"), dtype, NAME, matrix, columns // block, bits, part(1)),
    ]


def emit(c: Context, matrix: Matrix, dtype: int) -> str:
    """The values, in the type of the scales, which is the one that is multiplied in."""
    codes, scales = matrix.part("int4.codes"), matrix.part("int4.scales")
    block = block_of(matrix.columns)
    return c.g.op("DequantizeLinear", codes, scales, axis=matrix.axis, block_size=block)
