# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step leave their tokens pending, in GPU kernels: the rule of :mod:`nemo_build.state`."""

import triton
import triton.language as tl


@triton.jit
def stays_pending(tokens, RING: tl.constexpr):
    """Whether a row's new tokens stay pending where there is room for ``RING``."""
    return (tokens > 1) & (tokens <= RING)
