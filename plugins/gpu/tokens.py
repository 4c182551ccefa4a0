# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a step there are, in GPU kernels that take its rows one after the other."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_token(token, lengths, batch, steps):
    """Which of some tokens of ``[batch * steps]`` exist: before their row's length, where there are lengths."""
    there = token < batch * steps
    if lengths is not None:
        there = there & (token % steps < tl.load(lengths + token // steps, there, 0))
    return there
