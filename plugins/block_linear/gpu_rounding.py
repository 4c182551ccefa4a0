# SPDX-License-Identifier: Apache-2.0
"""The nodes that round the activations of ``BlockLinear``."""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu import rounding
from nemo_build.plugins.gpu.stored import BLOCK
from nemo_build.plugins.gpu.tokens import is_token


@triton.jit
def round_fp8(x, lengths, input_scale, batch, steps, codes, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of ``COLUMNS`` columns of one token."""
    token = tl.program_id(0) + tl.arange(0, 1)  # a block of one
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < K) & is_token(token, lengths, batch, steps)
    at = token.to(tl.int64)
    rounding.round_fp8(x, at, codes, at, column, inside, tl.load(input_scale), K)


@triton.jit
def round_nvfp4(x, lengths, input_scale, batch, steps, codes, scales, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes and block scales of ``COLUMNS`` columns of one token."""
    token = tl.program_id(0) + tl.arange(0, 1)  # a block of one
    block = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    inside = (block < K // BLOCK) & is_token(token, lengths, batch, steps)
    at = token.to(tl.int64)
    rounding.round_nvfp4(x, at, codes, scales, at, block, inside, tl.load(input_scale), K)


ROUND = {"fp8": round_fp8, "nvfp4": round_nvfp4}
"""The functions by format."""
