# SPDX-License-Identifier: Apache-2.0
"""NVFP4: 4-bit floats (E2M1), an E4M3 scale for each 16 of them, a float32 scale for the tensor.

    value = e2m1(code) * (float32(scale) * scale_2)

Blocks run along the last axis. Byte j of the codes holds element 2j in its low nibble and 2j + 1 in its high
one; bit 3 of a nibble is the sign. Rounding is to nearest with ties to the even code; a negative value that
rounds to zero keeps its sign (code 8), unless its quotient underflows; -0.0 is code 0.

The bytes are those that ModelOpt 0.47 exports when it computes on a CPU:

- Plain: ``NVFP4QTensor.quantize(weight, 16)``. ``scale_2 = amax / (6 * 448)``; a block's scale is ``block amax /
  (6 * scale_2)``, one if that is zero, clamped to [2^-9, 448].
- Four over six: static blocks with ``four_over_six``, calibrated by ``mse`` over the multipliers 1.0 and 1.5, as in
  the recipe of Nemotron 3.5 Lightning. ``scale_2 = amax / (6 * 256)`` leaves room for a block whose largest value
  becomes 4 rather than 6. A block takes the multiplier with the smaller sum of squared errors, 1.0 if they are
  equal. The errors are those of fake quantization, whose scales are rounded a little differently from the
  exported ones. Their sum is that of ``torch.sum`` over 16 contiguous floats on a CPU: lane i plus lane i + 8, then
  these eight one after the other (its kernel is built for 8 lanes at most, so AVX-512 does not change it). Blocks
  of zeros get ``256 / (amax / 6)``, clamped, in most tensors 448.

  Where the tensor's amax is at most 2^-24 * 6 / 1.75, ModelOpt judges candidates on a scale of one, hence keeps
  1.0; where ``amax * 1.75`` overflows too. ModelOpt runs this search on GPUs only, where division is approximate and
  sums have another order; blocks whose candidates nearly tie may differ there.

One deviation: a tensor of zeros, or of values so small that ``scale_2`` underflows to zero (below 2e-42), gets codes
0, block scales of one, and the ``scale_2`` of amax 1, where ModelOpt writes NaN scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.codecs import checks, native

#: Values that share a scale.
BLOCK = 16
#: Values of the codes 0 to 15.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

_ONE = np.float32(1)
_SCALE_OF_ONE = np.float32(1).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
_E4M3_MIN, _E4M3_MAX = np.float32(2.0**-9), np.float32(448)


@dataclass(frozen=True)
class Nvfp4Weight:
    """An encoded weight of shape [..., K].

    Attributes:
        codes: uint8 [..., K/2], two E2M1 codes a byte.
        scales: uint8 [..., K/16], the bytes of E4M3 numbers.
        scale_2: The tensor's scale.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    scale_2: np.float32

    @property
    def e4m3_scales(self) -> NDArray[Any]:
        """``scales`` viewed as ml_dtypes.float8_e4m3fn, [..., K/16]."""
        return self.scales.view(ml_dtypes.float8_e4m3fn)

    def decode(self, threads: int = 1) -> NDArray[np.float32]:
        """The values, float32 [..., K]."""
        return decode(self.codes, self.scales, self.scale_2, threads=threads)


def encode(
    weight: NDArray[Any],
    *,
    four_over_six: bool = False,
    amax: float | np.float32 | None = None,
    threads: int = 1,
) -> Nvfp4Weight:
    """Encode a weight; see the module for the numbers.

    Args:
        weight: [..., K] bfloat16, float16 or float32, K a multiple of 16.
        four_over_six: Choose for each block between the scales that map its largest value to 6 and to 4.
        amax: The tensor's largest magnitude, if ``weight`` is only some rows of it; None for the weight's own.
            Blocks far above it saturate.
        threads: Threads of the C++ kernels.

    Raises:
        ValueError: Values that are NaN or infinite (how many, and where the first is), another dtype, no values,
            K not a multiple of 16, or an amax that is not a non-negative number (or is zero for other values). The
            caller knows the tensor's name.
    """
    if not native.in_use():
        return encode_reference(weight, four_over_six=four_over_six, amax=amax)
    weight = _checked(weight)
    plan = _plan(checks.tensor_amax(checks.finite_amax(weight, threads), amax), four_over_six)
    if plan is None:
        return _zeros(weight.shape)
    codes, scales = native.nvfp4_encode(weight, plan, four_over_six, threads)
    return _shaped(weight.shape, codes, scales, plan)


def encode_reference(
    weight: NDArray[Any], *, four_over_six: bool = False, amax: float | np.float32 | None = None
) -> Nvfp4Weight:
    """The same as :func:`encode`, bytes and errors, in plain NumPy."""
    weight = _checked(weight)
    plan = _plan(checks.tensor_amax(checks.finite_amax(weight), amax), four_over_six)
    if plan is None:
        return _zeros(weight.shape)
    blocks = weight.reshape(-1, BLOCK).astype(np.float32)
    block_amax = np.abs(blocks).max(axis=1)
    with np.errstate(all="ignore"):  # quotients of the smallest and largest floats leave the range
        if four_over_six:
            block_amax = _chosen_amax(blocks, block_amax, plan)
            sixth = block_amax / np.float32(6)
            ratio = np.where(sixth == 0, _ONE, sixth) * np.float32(256) / np.float32(plan.divisor)
        else:
            ratio = block_amax / np.float32(plan.divisor)
            ratio = np.where(ratio == 0, _ONE, ratio)
        scales = np.clip(ratio, _E4M3_MIN, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
        quotients = blocks / (scales.astype(np.float32) * np.float32(plan.scale_2))[:, None]
    nibbles = _magnitude_codes(quotients) | ((quotients < 0).astype(np.uint8) << 3)
    codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return _shaped(weight.shape, codes, scales.view(np.uint8), plan)


def decode(
    codes: NDArray[np.uint8], scales: NDArray[Any], scale_2: float | np.float32, *, threads: int = 1
) -> NDArray[np.float32]:
    """The values of an encoded weight, as fake quantization has them (code 8 is -0.0).

    Args:
        codes: uint8 [..., K/2].
        scales: uint8 or float8_e4m3fn [..., K/16].
        scale_2: The tensor's scale.
        threads: Threads of the C++ kernels.

    Returns:
        float32 [..., K].

    Raises:
        ValueError: Shapes or dtypes do not belong together, or a scale is NaN.
    """
    scales = np.ascontiguousarray(scales).view(np.uint8)
    codes = np.ascontiguousarray(codes)
    if codes.dtype != np.uint8 or codes.shape != (*scales.shape[:-1], scales.shape[-1] * 8):
        raise ValueError(
            f"codes {codes.dtype} {list(codes.shape)} do not belong to scales {list(scales.shape)}: 8 bytes to one"
        )
    if ((scales & 0x7F) == 0x7F).any():
        raise ValueError(f"{int(((scales & 0x7F) == 0x7F).sum())} of {scales.size} block scales are NaN")
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    scale_2 = np.float32(scale_2)
    if native.in_use():
        return native.nvfp4_decode(codes, scales, scale_2, threads).reshape(shape)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, BLOCK)
    with np.errstate(all="ignore"):
        factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale_2
        values: NDArray[np.float32] = E2M1[nibbles] * factors.reshape(-1, 1)
    return values.reshape(shape)


def activation_scale(amax: float | np.float32) -> np.float32:
    """The ``input_scale`` that ModelOpt exports for NVFP4 activations: amax / (6 * 448).

    Raises ValueError for an amax that is not positive and finite, or too small for a scale.
    """
    return checks.activation_scale(amax, 6 * 448)


def _checked(weight: NDArray[Any]) -> NDArray[Any]:
    weight = checks.contiguous(weight)
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"a weight of shape {list(weight.shape)}: the last axis is not a multiple of {BLOCK}"
        )
    return weight


def _plan(amax: np.float32, four_over_six: bool) -> native.Plan | None:
    """The constants of a tensor; None if its scale would be zero. Each operation rounds to float32."""
    with np.errstate(all="ignore"):
        scale_2 = amax / np.float32(6 * (256 if four_over_six else 448))
        if scale_2 == 0:
            return None
        if not four_over_six:
            return native.Plan(scale_2, np.float32(6) * scale_2, 0, 0)
        top = amax * np.float32(448 / 256) / np.float32(6)
        top = _ONE if top <= np.float32(2.0**-24) else top
        to_fake = _ONE / top * _E4M3_MAX  # PyTorch divides a number by a tensor in these two steps
        return native.Plan(scale_2, amax / np.float32(6), to_fake, _ONE / to_fake)


def _zeros(shape: tuple[int, ...]) -> Nvfp4Weight:
    """What a tensor of zeros is encoded as, in either mode."""
    codes = np.zeros((*shape[:-1], shape[-1] // 2), np.uint8)
    scales = np.full((*shape[:-1], shape[-1] // BLOCK), _SCALE_OF_ONE)
    return Nvfp4Weight(codes, scales, _ONE / np.float32(6 * 448))


def _shaped(
    shape: tuple[int, ...], codes: NDArray[np.uint8], scales: NDArray[np.uint8], plan: native.Plan
) -> Nvfp4Weight:
    lead, width = shape[:-1], shape[-1]
    codes, scales = codes.reshape(*lead, width // 2), scales.reshape(*lead, width // BLOCK)
    return Nvfp4Weight(codes, scales, np.float32(plan.scale_2))


def _magnitude_codes(quotients: NDArray[Any]) -> NDArray[np.uint8]:
    """The nearest of the codes 0 to 7 to a quotient's magnitude, ties to even; 7 for NaN (0 / 0)."""
    q = np.abs(quotients)
    codes = np.full(q.shape, 7, np.uint8)
    for bound in (0.25, 1.25, 2.5, 5.0):
        codes -= q <= bound
    for bound in (0.75, 1.75, 3.5):
        codes -= q < bound
    return codes


def _chosen_amax(
    blocks: NDArray[np.float32], amax: NDArray[np.float32], plan: native.Plan
) -> NDArray[np.float32]:
    """For each block its amax or 1.5 times that, whichever quantizes it with the smaller squared error."""
    wide = amax * np.float32(1.5)
    chosen: NDArray[np.float32] = np.where(
        _squared_errors(blocks, wide, plan) < _squared_errors(blocks, amax, plan), wide, amax
    )
    return chosen


def _squared_errors(
    blocks: NDArray[np.float32], amax: NDArray[np.float32], plan: native.Plan
) -> NDArray[np.float32]:
    """Errors of fake quantization: scales go through E4M3 without the lower clamp, and zero ones give zeros."""
    ratio = np.minimum(amax / np.float32(6) * np.float32(plan.to_fake), _E4M3_MAX)
    scale = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(plan.from_fake)
    divide = np.where(np.isfinite(scale) & (scale != 0), scale, _ONE)[:, None]
    multiply = np.where(scale[:, None] == 0, np.float32(0), divide)
    error = np.abs(blocks) - E2M1[_magnitude_codes(blocks / divide)] * multiply
    squares = error * error
    pairs = squares[:, :8] + squares[:, 8:]
    total = np.zeros(len(blocks), np.float32)
    for lane in range(8):
        total = total + pairs[:, lane]
    return total
