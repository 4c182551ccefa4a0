# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 codes as the checkpoint stores them, with one factor a projection."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nemo_build.engines.trt.emitter import BFLOAT16
from nemo_build.engines.trt.forms import Matrix, RowsWeight
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.weights import Weight

NAME = "fp8"
MIN_SM = 89
TURNS = False


def fits(columns: int) -> bool:
    """Always."""
    return True


def tensors(matrix: Matrix, compute: int) -> list[Weight]:
    """The codes."""
    name = f"{matrix.name}.fp8.codes"
    return [RowsWeight(name, "F8_E4M3", NAME, matrix, matrix.columns, 8, lambda _, stored, __: stored[0])]


def emit(c: Context, matrix: Matrix, dtype: int) -> str:
    """The codes' values; the factor is not in them."""
    return c.g.op("DequantizeLinear", f"{matrix.name}.fp8.codes", one(c, dtype))


def round_input(c: Context, x: str, scale: str) -> str:
    """To E4M3 with the static `scale`."""
    zero = c.g.constant(np.array(0, ml_dtypes.float8_e4m3fn))
    return c.g.op("DequantizeLinear", c.g.op("QuantizeLinear", x, scale, zero), scale)


def one(c: Context, dtype: int) -> str:
    """The scale one in an ONNX type, bfloat16 or float32, which is the type of what is decoded with it."""
    return c.g.constant(np.array(1, ml_dtypes.bfloat16 if dtype == BFLOAT16 else np.float32))
