# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 weights with one scale a tensor, as ModelOpt exports them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.formats import Part

NAME = "fp8"
DTYPES = ("F8_E4M3",)
ACTIVATIONS = "fp8"


def parts(shape: tuple[int, int]) -> dict[str, Part]:
    """Codes and the scale."""
    return {"weight": Part(shape, DTYPES), "weight_scale": Part((), ("F32",))}


def dequantize(out: str, parts: list[str], like: str) -> str:
    """``codes * scale``."""
    weight, scale = parts
    return f"""
      {out}_codes = CastLike ({weight}, {like})
      {out}_scale = CastLike ({scale}, {like})
      {out} = Mul ({out}_codes, {out}_scale)"""


def decode(weight: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    """``codes * scale`` in float32; `weight` is float8_e4m3fn."""
    values: NDArray[np.float32] = weight.astype(np.float32) * np.float32(np.asarray(scale).reshape(-1)[0])
    return values
