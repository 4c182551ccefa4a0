# SPDX-License-Identifier: Apache-2.0
"""NVFP4: E2M1 codes with an E4M3 scale for each 16 along a row, and one factor a projection."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.forms import Codes, Matrix, RowsWeight, values
from nemo_build.engines.trt.forms.fp8 import one
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.weights import Weight
from nemo_build.errors import CheckpointError
from nemo_build.plugins.codecs import nvfp4 as codec

NAME = "nvfp4"
MIN_SM = 120
TURNS = True


def fits(columns: int) -> bool:
    """Whole blocks."""
    return columns % codec.BLOCK == 0


def tensors(matrix: Matrix, compute: int) -> list[Weight]:
    """Codes and block scales: the checkpoint's, or what an unquantized projection is encoded as."""

    def part(index: int) -> Any:
        def encode(projection: StoredProjection, stored: Codes, folder: Path) -> NDArray[Any]:
            encoded = stored if projection.stored_format == NAME else _encode(projection, stored, folder)
            chosen = encoded[index]
            assert chosen is not None, "NVFP4 has block scales"
            return chosen

        return encode

    columns = matrix.columns
    return [
        RowsWeight(matrix.part("nvfp4.codes"), "F4_E2M1", NAME, matrix, columns, 4, part(0)),
        RowsWeight(matrix.part("nvfp4.scales"), "F8_E4M3", NAME, matrix, columns // codec.BLOCK, 8, part(1)),
    ]


def factor(projection: StoredProjection, folder: Path) -> float:
    """The scale of the whole projection."""
    if projection.stored_format == NAME:
        return projection.scale(folder)
    nothing = np.zeros((1, codec.BLOCK), np.float32)
    return float(codec.encode(nothing, four_over_six=True, amax=_amax(projection, folder)).scale_2)


def emit(c: Context, matrix: Matrix, dtype: int) -> str:
    """Codes times block scales; the factor is not in them."""
    scales = c.g.op("DequantizeLinear", matrix.part("nvfp4.scales"), one(c, dtype))
    codes = matrix.part("nvfp4.codes")
    return c.g.op("DequantizeLinear", codes, scales, axis=matrix.axis, block_size=codec.BLOCK)


def round_input(c: Context, x: str, scale: str) -> str:
    """To E2M1 in blocks of 16 along the last axis, whose scales are found at run time below the static `scale`."""
    float8 = 17  # onnx.TensorProto.FLOAT8E4M3FN
    codes, scales = c.g.ops(
        "TRT_FP4DynamicQuantize",
        2,
        x,
        scale,
        domain="trt",
        axis=-1,
        block_size=codec.BLOCK,
        scale_type=float8,
    )
    steps = c.g.op("DequantizeLinear", scales, scale)
    return c.g.op("DequantizeLinear", codes, steps, axis=-1, block_size=codec.BLOCK)


def _encode(projection: StoredProjection, stored: Codes, folder: Path) -> Codes:
    try:
        encoded = codec.encode(
            values(projection, stored, folder), four_over_six=True, amax=_amax(projection, folder)
        )
    except ValueError as error:
        name = projection.parts[0].name
        raise CheckpointError(f"{name} cannot be converted to nvfp4: {error}.") from error
    return encoded.codes, encoded.scales


@lru_cache(maxsize=8)
def _amax(projection: StoredProjection, folder: Path) -> float:
    """The largest magnitude of a projection, which is read once more for that."""
    pieces = (values(projection, projection.read_rows(folder, *c), folder) for c in projection.row_chunks())
    return max(float(np.abs(p.astype(np.float32)).max()) for p in pieces)
