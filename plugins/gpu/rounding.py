# SPDX-License-Identifier: Apache-2.0
"""Rounding to 8-bit and 4-bit floats in GPU kernels, to nearest and ties to even, on every architecture.

Activations are rounded by the rules of ``plugins/formats/activations.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu.stored import BLOCK, as_bytes, e4m3_of_bytes


@triton.jit
def to_e4m3(value):
    """The E4M3 code (uint8) of a float32 of magnitude 448 at most."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of the fraction stay, and the exponent's bias goes from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Next to 2^14, float32 has steps of 2^-9, which are E4M3's below 2^-6.
    small = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_e2m1(value):
    """The E2M1 code (uint8, 0 to 15) of a float32; 6 at most. Negative values keep their sign, -0.0 does not."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75).to(tl.uint8) + (size > 1.25).to(tl.uint8)
    code += (size >= 1.75).to(tl.uint8) + (size > 2.5).to(tl.uint8) + (size >= 3.5).to(tl.uint8)
    code += (size > 5.0).to(tl.uint8)
    return code | ((value < 0).to(tl.uint8) << 3)


@triton.jit
def round_fp8(x, source, codes, target, column, inside, unit, K: tl.constexpr):
    """Some columns ``[N]`` of one token to E4M3, ``e4m3(x / unit)``.

    Args:
        x: Numbers ``[..., K]``.
        source: The token's row in them, int64 ``[1]``.
        codes: Words of codes ``[..., K]``.
        target: Its row in these, int64 ``[1]``.
        column: Which columns.
        inside: Whether there is such a column of the token, bool ``[N]``.
        unit: The scale.
        K: Width.
    """
    value = tl.load(x + source * K + column, inside, 0.0).to(tl.float32)
    ratio = tl.clamp(tl.div_rn(value, unit), -448.0, 448.0)
    tl.store(as_bytes(codes) + target * K + column, to_e4m3(ratio), inside)


@triton.jit
def round_nvfp4(x, source, codes, scales, target, block, inside, unit, K: tl.constexpr):
    """Some blocks ``[N]`` of one token to E2M1 with E4M3 block scales, below the one static scale ``unit``.

    Args as in :func:`round_fp8`; ``scales`` are words of block scales ``[..., K / 16]``.
    """
    BLOCKS: tl.constexpr = block.shape[0]
    column = (source * (K // BLOCK) + block)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + column, inside[:, None], 0.0).to(tl.float32)
    wanted = tl.div_rn(tl.max(tl.abs(value), 1), unit * 6.0)
    scale = to_e4m3(tl.clamp(wanted, 1.0 / 512, 448.0))  # never zero
    step = e4m3_of_bytes(scale).to(tl.float32) * 256.0 * unit
    code = to_e2m1(tl.div_rn(value, tl.broadcast_to(step[:, None], (BLOCKS, BLOCK))))
    low, high = tl.split(tl.reshape(code, (BLOCKS, BLOCK // 2, 2)))
    at = target * (K // BLOCK) + block
    byte = at[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(as_bytes(codes) + byte, low | (high << 4), inside[:, None])
    tl.store(as_bytes(scales) + at, scale, inside)
