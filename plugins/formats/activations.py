# SPDX-License-Identifier: Apache-2.0
"""Rounding of activations, as ONNX text and in NumPy.

Each text defines the value ``out`` from ``x`` (last axis K) and the float32 scalar ``scale``; names made on the
way begin with ``tag``.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_FLOAT8E4M3FN = 17  # onnx.TensorProto.FLOAT8E4M3FN
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_SMALLEST_SCALE = 2.0**-9  # of E4M3; a block scale never underflows to zero
BLOCK = 16  # of NVFP4


def none(out: str, x: str, scale: str, tag: str) -> str:
    """As it is."""
    return f"{out} = Identity ({x})"


def fp8(out: str, x: str, scale: str, tag: str) -> str:
    """E4M3 with one static scale: ``e4m3(x / scale) * scale``."""
    return f"""
      {tag}_scale = CastLike ({scale}, {x})
      {tag}_ratio = Div ({x}, {tag}_scale)
      {tag}_low = Constant <value_float = -{_E4M3_MAX}> ()
      {tag}_high = Constant <value_float = {_E4M3_MAX}> ()
      {tag}_low_x = CastLike ({tag}_low, {x})
      {tag}_high_x = CastLike ({tag}_high, {x})
      {tag}_held = Clip ({tag}_ratio, {tag}_low_x, {tag}_high_x)
      {tag}_bytes = Cast <to = {_FLOAT8E4M3FN}> ({tag}_held)
      {tag}_back = CastLike ({tag}_bytes, {x})
      {out} = Mul ({tag}_back, {tag}_scale)"""


def nvfp4(out: str, x: str, scale: str, tag: str) -> str:
    """E2M1 in blocks of 16 with dynamic E4M3 block scales below one static scale.

    E2M1 rounds to steps of 0.5 below 2, of 1 below 4 and of 2 above, halves to even, up to 6.
    """
    return f"""
      {tag}_shape = Shape ({x})
      {tag}_block = Constant <value_ints = [{BLOCK}]> ()
      {tag}_zero1 = Constant <value_ints = [0]> ()
      {tag}_minus1 = Constant <value_ints = [-1]> ()
      {tag}_lead = Slice ({tag}_shape, {tag}_zero1, {tag}_minus1)
      {tag}_width = Shape <start = -1> ({x})
      {tag}_count = Div ({tag}_width, {tag}_block)
      {tag}_blocked = Concat <axis = 0> ({tag}_lead, {tag}_count, {tag}_block)
      {tag}_blocks = Reshape <allowzero = 1> ({x}, {tag}_blocked)
      {tag}_scale = CastLike ({scale}, {x})
      {tag}_sizes = Abs ({tag}_blocks)
      {tag}_amax = ReduceMax <keepdims = 1> ({tag}_sizes, {tag}_minus1)
      {tag}_six = Constant <value_float = {_E2M1_MAX}> ()
      {tag}_six_x = CastLike ({tag}_six, {x})
      {tag}_unit = Mul ({tag}_scale, {tag}_six_x)
      {tag}_wanted = Div ({tag}_amax, {tag}_unit)
      {tag}_low = Constant <value_float = {_SMALLEST_SCALE}> ()
      {tag}_high = Constant <value_float = {_E4M3_MAX}> ()
      {tag}_low_x = CastLike ({tag}_low, {x})
      {tag}_high_x = CastLike ({tag}_high, {x})
      {tag}_held = Clip ({tag}_wanted, {tag}_low_x, {tag}_high_x)
      {tag}_bytes = Cast <to = {_FLOAT8E4M3FN}> ({tag}_held)
      {tag}_block_scale = CastLike ({tag}_bytes, {x})
      {tag}_step = Mul ({tag}_block_scale, {tag}_scale)
      {tag}_ratio = Div ({tag}_sizes, {tag}_step)
      {tag}_two_f = Constant <value_float = 2.0> ()
      {tag}_four_f = Constant <value_float = 4.0> ()
      {tag}_two = CastLike ({tag}_two_f, {x})
      {tag}_four = CastLike ({tag}_four_f, {x})
      {tag}_doubled = Mul ({tag}_ratio, {tag}_two)
      {tag}_halved = Div ({tag}_ratio, {tag}_two)
      {tag}_fine_r = Round ({tag}_doubled)
      {tag}_fine = Div ({tag}_fine_r, {tag}_two)
      {tag}_middle = Round ({tag}_ratio)
      {tag}_coarse_r = Round ({tag}_halved)
      {tag}_coarse_m = Mul ({tag}_coarse_r, {tag}_two)
      {tag}_coarse = Min ({tag}_coarse_m, {tag}_six_x)
      {tag}_is_middle = Less ({tag}_ratio, {tag}_four)
      {tag}_is_fine = Less ({tag}_ratio, {tag}_two)
      {tag}_upper = Where ({tag}_is_middle, {tag}_middle, {tag}_coarse)
      {tag}_size = Where ({tag}_is_fine, {tag}_fine, {tag}_upper)
      {tag}_sign = Sign ({tag}_blocks)
      {tag}_signed = Mul ({tag}_size, {tag}_sign)
      {tag}_values = Mul ({tag}_signed, {tag}_step)
      {out} = Reshape <allowzero = 1> ({tag}_values, {tag}_shape)"""


def reference(name: str, x: Array, scale: Array | None) -> Array:
    """What the text of the activation format `name` computes, in float32."""
    if name == "none" or scale is None:
        return x
    s = np.float32(np.asarray(scale).reshape(-1)[0])
    if name == "fp8":
        held = np.clip(x / s, -_E4M3_MAX, _E4M3_MAX)
        rounded: Array = held.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s
        return rounded
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    wanted = np.clip(amax / (s * np.float32(_E2M1_MAX)), _SMALLEST_SCALE, _E4M3_MAX)
    step = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s
    codes = np.clip(blocks / step, -_E2M1_MAX, _E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
    values: Array = (codes.astype(np.float32) * step).reshape(x.shape)
    return values
