# SPDX-License-Identifier: Apache-2.0
"""Unquantized weights: bfloat16, float16 or float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.formats import Part

NAME = "plain"
DTYPES = ("BF16", "F16", "F32")
ACTIVATIONS = "none"


def parts(shape: tuple[int, int]) -> dict[str, Part]:
    """The weight itself."""
    return {"weight": Part(shape, DTYPES)}


def dequantize(out: str, parts: list[str], like: str) -> str:
    """A cast."""
    return f"{out} = CastLike ({parts[0]}, {like})"


def decode(weight: NDArray[Any]) -> NDArray[np.float32]:
    """The weight in float32."""
    return weight.astype(np.float32)
