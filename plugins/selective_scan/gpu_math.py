# SPDX-License-Identifier: Apache-2.0
"""What the kernels of ``SelectiveScan`` share: every kernel computes a token's values by the same operations."""

import triton
import triton.language as tl


@triton.jit
def time_step(raw, LOW: tl.constexpr, HIGH: tl.constexpr):
    """clamp(softplus(raw)), float32.

    softplus(v) = max(v, 0) + log1p(e) with e = exp(-|v|). log1p(e) is log(u) e / (u - 1) with u the rounded 1 + e,
    which undoes the rounding of u; where u is 1 it is e, and softplus(v) is v for large v.
    """
    e = tl.exp(-tl.abs(raw))
    u = 1.0 + e
    lost = tl.where(u == 1.0, 1.0, u - 1.0)
    soft = tl.maximum(raw, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / lost))
    return tl.minimum(tl.maximum(soft, LOW), HIGH)


@triton.jit
def decay_rate(a_log, head):
    """The decay rate a = -exp(a_log) of a head or of some heads."""
    return -tl.exp(tl.load(a_log + head).to(tl.float32))


@triton.jit
def rounded(v, PRECISION: tl.constexpr):
    """A factor of a product as it is to be used: tensor cores cut numbers off to tf32, so they are rounded before."""
    if PRECISION == "tf32":
        return ((v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return v
