# SPDX-License-Identifier: Apache-2.0
"""What every encoder checks before it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.codecs import native

#: The smallest normal float32.
_NORMAL = np.finfo(np.float32).tiny


def contiguous(weight: NDArray[Any]) -> NDArray[Any]:
    """The weight as a contiguous array that the encoders can read; no copy if it is one.

    Raises ValueError for a dtype other than bfloat16, float16 and float32, for a scalar and for no values.
    """
    if weight.dtype not in native.DTYPES:
        raise ValueError(f"a weight of dtype {weight.dtype}; bfloat16, float16 and float32 can be encoded")
    if weight.ndim == 0 or weight.size == 0:
        raise ValueError(f"a weight of shape {list(weight.shape)} has nothing to encode")
    return np.ascontiguousarray(weight)


def finite_amax(weight: NDArray[Any], threads: int = 1) -> np.float32:
    """The largest magnitude of a contiguous weight.

    Raises ValueError if values are NaN or infinite; it says how many, and which is the first.
    """
    if native.in_use():
        amax = native.amax(weight, threads)
    else:
        top = np.abs(weight.astype(np.float32)).max()
        amax = np.float32(top) if np.isfinite(top) else None
    if amax is None:
        bad = np.flatnonzero(~np.isfinite(weight.reshape(-1).astype(np.float32)))
        value, where = weight.reshape(-1)[bad[0]], [int(i) for i in np.unravel_index(bad[0], weight.shape)]
        raise ValueError(
            f"{bad.size} of {weight.size} values are NaN or infinite; the first is {value} at flat index {bad[0]}, "
            f"{where}"
        )
    return amax


def tensor_amax(own: np.float32, given: float | np.float32 | None) -> np.float32:
    """The magnitude a tensor's scale is made for: the given one, else the weight's own.

    Raises ValueError for one that is not a non-negative number, or that is zero or denormal for larger values.
    """
    if given is None:
        return own
    amax = np.float32(given)
    if not (np.isfinite(amax) and amax >= min(own, _NORMAL)):
        raise ValueError(f"an amax of {given} for a weight with values up to {own}")
    return amax


def activation_scale(amax: float | np.float32, divisor: int) -> np.float32:
    """amax / divisor in float32.

    Raises ValueError for an amax that is not positive and finite, or too small for a scale.
    """
    with np.errstate(all="ignore"):
        scale = np.float32(amax) / np.float32(divisor)
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(
            f"an activation amax of {amax} gives the scale {scale}; it must be positive and finite"
        )
    return np.float32(scale)
