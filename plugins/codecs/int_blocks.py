# SPDX-License-Identifier: Apache-2.0
"""INT8 and INT4 weights: signed integers with a bfloat16 scale for each 32 along the last axis.

value = code * scale. Formats of this project's CPU engines, for checkpoints that are not quantized; no checkpoint
stores them.

- INT8: ``scale = amax / 127``, codes -127 to 127.
- INT4: codes -8 to 7, stored as code + 8, two a byte, the lower half first. The scale is the value of the largest
  magnitude over -8, so that this value, whatever its sign, is met (up to the scale's rounding) and all codes are used.

Scales are rounded to bfloat16 before codes are chosen, so codes are the nearest for the scale that is stored.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Values that share a scale."""

Encoded = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def encode_int8(weight: NDArray[Any]) -> Encoded:
    """Codes uint8 ``[N, K]`` (two's complement) and scales uint8 ``[N, 2*ceil(K/32)]`` (bfloat16) of a weight."""
    blocks = _blocks(weight)
    scale = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(ml_dtypes.bfloat16)
    codes = _codes(blocks, scale, -127, 127).astype(np.int8)
    return _flat(codes, weight.shape[-1]).view(np.uint8), scale.view(np.uint8)


def encode_int4(weight: NDArray[Any]) -> Encoded:
    """Codes uint8 ``[N, ceil(K/2)]`` and scales uint8 ``[N, 2*ceil(K/32)]`` (bfloat16) of a weight."""
    blocks = _blocks(weight)
    at = np.abs(blocks).argmax(axis=-1)[..., None]
    scale = (np.take_along_axis(blocks, at, axis=-1)[..., 0] / np.float32(-8)).astype(ml_dtypes.bfloat16)
    codes = (_codes(blocks, scale, -8, 7) + 8).astype(np.uint8)
    pairs = _flat(codes, weight.shape[-1] + weight.shape[-1] % 2)
    packed: NDArray[np.uint8] = pairs[:, 0::2] | pairs[:, 1::2] << 4
    return packed, scale.view(np.uint8)


def decode_int8(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values ``[N, K]`` in float32."""
    return _decode(codes.view(np.int8).astype(np.float32), scales)


def decode_int4(codes: NDArray[np.uint8], scales: NDArray[np.uint8], columns: int) -> NDArray[np.float32]:
    """The values ``[N, columns]`` in float32."""
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)[:, :columns]
    return _decode(values.astype(np.float32) - 8, scales)


def _blocks(weight: NDArray[Any]) -> NDArray[np.float32]:
    """float32 ``[N, ceil(K/32), 32]``, padded with zeros. Raises ValueError for NaN and infinite values."""
    values = weight.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} values are NaN or infinite")
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % BLOCK)))
    return padded.reshape(len(values), -1, BLOCK)


def _codes(blocks: NDArray[np.float32], scale: NDArray[Any], low: int, high: int) -> NDArray[np.float32]:
    step = scale.astype(np.float32)[..., None]
    codes: NDArray[np.float32] = np.clip(np.rint(blocks / np.where(step == 0, 1, step)), low, high)
    return codes


def _flat(codes: NDArray[Any], columns: int) -> NDArray[Any]:
    return np.ascontiguousarray(codes.reshape(len(codes), -1)[:, :columns])


def _decode(codes: NDArray[np.float32], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    steps = np.ascontiguousarray(scales).view(ml_dtypes.bfloat16).astype(np.float32)
    values: NDArray[np.float32] = codes * np.repeat(steps, BLOCK, axis=-1)[:, : codes.shape[1]]
    return values
