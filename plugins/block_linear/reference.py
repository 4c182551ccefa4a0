# SPDX-License-Identifier: Apache-2.0
"""Reference of ``BlockLinear``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops."""
    return """
      w = CastLike (weight, x)
      wt = Transpose <perm = [1, 0]> (w)
      y = MatMul (x, wt)
    """


def reference(
    x: NDArray[Any], weight: NDArray[Any], lengths: NDArray[np.int64] | None = None
) -> NDArray[Any]:
    """y = x @ weight^T. Shapes as in the schema."""
    y: NDArray[Any] = x @ weight.astype(x.dtype).T
    return y
