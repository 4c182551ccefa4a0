# SPDX-License-Identifier: Apache-2.0
"""FP8 of weights: E4M3 codes and one float32 scale, value = e4m3(code) * scale.

The bytes are those that ModelOpt 0.47 exports when it computes on a CPU: ``scale = amax / 448``, and the code is
``e4m3(dtype(float32(weight) / scale))``. The quotient is rounded to the weight's own dtype first, because PyTorch
gives a bfloat16 tensor divided by a 0-d float32 tensor in bfloat16; rounding float32 quotients directly
would change some bytes of bfloat16 weights. Ties go to even; signs of zeros are kept.

Two deviations. A tensor of zeros (or one whose scale underflows to zero) gets the scale of amax 1 and zeros of the
weight's signs, where ModelOpt fails. Magnitudes past 448, which only an amax below the weight's own gives, saturate,
where ModelOpt writes NaN from 464 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.codecs import checks, native

_MAX = np.float32(448)
_ONE = np.float32(1)
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class Fp8Weight:
    """An encoded weight of shape [...].

    Attributes:
        codes: uint8 [...], the bytes of E4M3 numbers.
        scale: The tensor's scale.
    """

    codes: NDArray[np.uint8]
    scale: np.float32

    @property
    def e4m3_codes(self) -> NDArray[Any]:
        """``codes`` viewed as ml_dtypes.float8_e4m3fn, [...]."""
        return self.codes.view(ml_dtypes.float8_e4m3fn)

    def decode(self) -> NDArray[np.float32]:
        """The values, float32 [...]."""
        return decode(self.codes, self.scale)


def encode(weight: NDArray[Any], amax: float | np.float32 | None = None, *, threads: int = 1) -> Fp8Weight:
    """Encode a weight; see the module for the numbers.

    Args:
        weight: bfloat16, float16 or float32, any shape with values.
        amax: The magnitude that becomes 448; None for the weight's largest.
        threads: Threads of the C++ kernels.

    Raises:
        ValueError: Values that are NaN or infinite (how many, and where the first is), another dtype, no values,
            or an amax that is not a non-negative number (or is zero for other values). The caller knows the
            tensor's name.
    """
    if not native.in_use():
        return encode_reference(weight, amax)
    weight = checks.contiguous(weight)
    scale = _scale(checks.finite_amax(weight, threads), amax)
    return Fp8Weight(native.fp8_encode(weight, scale, threads).reshape(weight.shape), scale)


def encode_reference(weight: NDArray[Any], amax: float | np.float32 | None = None) -> Fp8Weight:
    """The same as :func:`encode`, bytes and errors, in plain NumPy."""
    weight = checks.contiguous(weight)
    scale = _scale(checks.finite_amax(weight), amax)
    with np.errstate(all="ignore"):
        quotients = np.clip(weight.astype(np.float32) / scale, -_MAX, _MAX)
        rounded = quotients.astype(weight.dtype).astype(np.float32)
    return Fp8Weight(rounded.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale)


def decode(codes: NDArray[Any], scale: float | np.float32) -> NDArray[np.float32]:
    """The values of codes (uint8 or float8_e4m3fn [...]), float32 [...]. A NaN code gives NaN."""
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = _VALUES[np.asarray(codes).view(np.uint8)] * np.float32(scale)
    return values


def least_error_amax(
    weight: NDArray[Any], multipliers: Sequence[float] = (1.0, 1.5), *, threads: int = 1
) -> np.float32:
    """The amax that ModelOpt's ``mse`` calibration chooses: the weight's own times the multiplier of least error.

    The recipe of Nemotron 3.5 Lightning calibrates all weights so, FP8 ones included. The product is rounded to the
    weight's dtype, in which ModelOpt keeps it. ModelOpt adds squared errors in float32, in an order that depends on
    the number of threads; this adds them in float64, and can differ only where both sums agree to 5 digits. A
    product that overflows the dtype is not taken; ModelOpt then exports an infinite scale.

    Raises:
        ValueError: As :func:`encode`.
    """
    weight = checks.contiguous(weight)
    amax = checks.finite_amax(weight, threads)
    return choose_amax(amax, weight.dtype, lambda c: squared_error(weight, c, threads=threads), multipliers)


def choose_amax(
    amax: float | np.float32,
    dtype: Any,
    error: Callable[[np.float32], float],
    multipliers: Sequence[float] = (1.0, 1.5),
) -> np.float32:
    """:func:`least_error_amax` for a weight that is not in memory as a whole.

    Args:
        amax: The weight's largest magnitude.
        dtype: The weight's NumPy dtype.
        error: Gives the :func:`squared_error` of the whole weight for a candidate.
        multipliers: What `amax` is multiplied by.
    """
    with np.errstate(all="ignore"):
        candidates = [np.float32(amax) * np.float32(m) for m in multipliers]
        # In float32, where ModelOpt's sums overflow for weights past 1e18: it then takes the first.
        errors = [np.float32(error(c)) for c in candidates]
        best = candidates[int(np.argmin(errors))].astype(dtype).astype(np.float32)
    return np.float32(best if np.isfinite(best) else amax)


def squared_error(weight: NDArray[Any], amax: float | np.float32, *, threads: int = 1) -> float:
    """Sum of the squared errors of ModelOpt's fake quantization, the loss of its ``mse`` calibration.

    Args:
        weight: bfloat16, float16 or float32 without NaN and infinities.
        amax: The magnitude that becomes 448.
        threads: Threads of the C++ kernels.
    """
    with np.errstate(all="ignore"):
        top = np.float32(amax)
        # PyTorch divides a number by a tensor in these two steps.
        to_fake = _ONE / (top if top > np.float32(2.0**-24) else _ONE) * _MAX
        from_fake = _ONE / to_fake
        if native.in_use():
            return native.fp8_error(checks.contiguous(weight), to_fake, from_fake, threads)
        values = np.abs(weight.astype(np.float32))
        fakes = np.minimum(values * to_fake, _MAX).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        error = values - fakes * from_fake
        return float(np.square(error).sum(dtype=np.float64))


def activation_scale(amax: float | np.float32) -> np.float32:
    """The ``input_scale`` that ModelOpt exports for FP8 activations: amax / 448.

    Raises ValueError for an amax that is not positive and finite, or too small for a scale.
    """
    return checks.activation_scale(amax, 448)


def _scale(own: np.float32, given: float | np.float32 | None) -> np.float32:
    scale = np.float32(checks.tensor_amax(own, given) / _MAX)
    return scale if scale else np.float32(_ONE / _MAX)
