# SPDX-License-Identifier: Apache-2.0
"""Weights in the type that is multiplied in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.forms import COMPUTE_NAMES, Codes, Matrix, RowsWeight, values
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.weights import CopiedWeight, Weight

NAME = "plain"
MIN_SM = 80
TURNS = False

_NUMPY = {"BF16": (ml_dtypes.bfloat16, 16), "F32": (np.float32, 32)}


def fits(columns: int) -> bool:
    """Always."""
    return True


def tensors(matrix: Matrix, compute: int) -> list[Weight]:
    """The checkpoint's own tensor if that is of the type, so that a tied head and its table are one constant."""
    dtype = COMPUTE_NAMES[compute]
    stored = matrix.projections[0].parts[0]
    if not matrix.stacked and stored.dtype == dtype:
        return [CopiedWeight(stored, gathered=True)]
    kind, bits = _NUMPY[dtype]

    def encode(projection: StoredProjection, codes: Codes, folder: Path) -> NDArray[Any]:
        return values(projection, codes, folder).astype(kind)

    return [RowsWeight(f"{matrix.name}.plain", dtype, NAME, matrix, matrix.columns, bits, encode)]


def emit(c: Context, matrix: Matrix, dtype: int) -> str:
    """The constant itself; `dtype` is the type that is multiplied in, as it has no other."""
    return tensors(matrix, dtype)[0].name
