# SPDX-License-Identifier: Apache-2.0
"""Reference of ``BlockLinear``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.formats import ACTIVATIONS, activations, formats

Array = NDArray[Any]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops."""
    weight_format = formats()[attributes.get("weight_format", "plain")]
    rounded = ACTIVATIONS[attributes.get("activation_format", "none")]
    parts = [p for p in ("weight", "weight_scale", "weight_scale_2") if p in present]
    return f"""
      {rounded("x_used", "x", "input_scale", "x_q")}
      {weight_format.dequantize("w", parts, "x")}
      wt = Transpose <perm = [1, 0]> (w)
      y = MatMul (x_used, wt)
    """


def reference(
    x: Array,
    weight: Array,
    lengths: NDArray[np.int64] | None = None,
    weight_scale: Array | None = None,
    weight_scale_2: Array | None = None,
    input_scale: Array | None = None,
    *,
    weight_format: str = "plain",
    activation_format: str = "none",
) -> Array:
    """y = round(x) @ decode(weight)^T. Shapes as in the schema."""
    parts = [p for p in (weight, weight_scale, weight_scale_2) if p is not None]
    w = formats()[weight_format].decode(*parts).astype(x.dtype)
    y: Array = activations.reference(activation_format, x, input_scale) @ w.T
    return y
