# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights, as ModelOpt exports them.

E2M1 codes, two a byte along K (the lower half first), an E4M3 scale for each block of 16 and one float32 scale a
tensor; value = e2m1(code) * (block scale * tensor scale). Four-over-six needs nothing special here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.codecs import nvfp4 as codec
from nemo_build.plugins.formats import Part

NAME = "nvfp4"
DTYPES = ("U8",)
ACTIVATIONS = "nvfp4"
BLOCK = codec.BLOCK

_FLOAT, _INT32 = 1, 6  # onnx.TensorProto


def parts(shape: tuple[int, int]) -> dict[str, Part]:
    """Codes, block scales and the tensor's scale."""
    rows, columns = shape
    return {
        "weight": Part((rows, columns // 2), DTYPES),
        "weight_scale": Part((rows, columns // BLOCK), ("F8_E4M3",)),
        "weight_scale_2": Part((), ("F32",)),
    }


def dequantize(out: str, parts: list[str], like: str) -> str:
    """Table look-up of the halves of each byte, times the scales; in float32, whatever the type of `like`."""
    weight, scale, scale_2 = parts
    values = ", ".join(str(float(v)) for v in codec.E2M1)
    return f"""
      {out}_table = Constant <value_floats = [{values}]> ()
      {out}_mask_i = Constant <value_int = 15> ()
      {out}_four_i = Constant <value_int = 4> ()
      {out}_mask = CastLike ({out}_mask_i, {weight})
      {out}_four = CastLike ({out}_four_i, {weight})
      {out}_low = BitwiseAnd ({weight}, {out}_mask)
      {out}_high = BitShift <direction = "RIGHT"> ({weight}, {out}_four)
      {out}_two = Constant <value_ints = [2]> ()
      {out}_low3 = Unsqueeze ({out}_low, {out}_two)
      {out}_high3 = Unsqueeze ({out}_high, {out}_two)
      {out}_pairs = Concat <axis = 2> ({out}_low3, {out}_high3)
      {out}_block_shape = Constant <value_ints = [0, -1, {BLOCK}]> ()
      {out}_blocked = Reshape ({out}_pairs, {out}_block_shape)
      {out}_index = Cast <to = {_INT32}> ({out}_blocked)
      {out}_e2m1 = Gather <axis = 0> ({out}_table, {out}_index)
      {out}_scale_f = Cast <to = {_FLOAT}> ({scale})
      {out}_scale_all = Mul ({out}_scale_f, {scale_2})
      {out}_scale3 = Unsqueeze ({out}_scale_all, {out}_two)
      {out}_values = Mul ({out}_e2m1, {out}_scale3)
      {out}_flat_shape = Constant <value_ints = [0, -1]> ()
      {out}_flat = Reshape ({out}_values, {out}_flat_shape)
      {out} = CastLike ({out}_flat, {like})"""


def decode(weight: NDArray[Any], scale: NDArray[Any], scale_2: NDArray[Any]) -> NDArray[np.float32]:
    """The weight in float32; `weight` is uint8 ``[N, K/2]``, `scale` float8_e4m3fn ``[N, K/16]``."""
    return codec.decode(weight, scale, float(np.asarray(scale_2).reshape(-1)[0]))
