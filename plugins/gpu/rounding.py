# SPDX-License-Identifier: Apache-2.0
"""Rounding to 8-bit and 4-bit floats in GPU kernels, to nearest and ties to even, on every architecture."""

from __future__ import annotations

import triton
import triton.language as tl


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
