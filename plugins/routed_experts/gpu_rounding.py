# SPDX-License-Identifier: Apache-2.0
"""The nodes that round the inputs of experts: a code for each pair of token and choice, as experts have own scales."""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu import rounding
from nemo_build.plugins.gpu.stored import BLOCK
from nemo_build.plugins.gpu.tokens import is_token


@triton.jit
def round_fp8(
    x,
    indices,
    lengths,
    input_scale,
    batch,
    steps,
    codes,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes of ``COLUMNS`` columns of one pair. ``x`` has a row for each token if ``OF_TOKENS``, else for each pair."""
    pair = tl.program_id(0) + tl.arange(0, 1)  # a block of one
    active = is_token(pair // TOP_K, lengths, batch, steps)
    unit = _scale(input_scale, indices, pair, active)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = (pair // TOP_K if OF_TOKENS else pair).to(tl.int64)
    rounding.round_fp8(x, source, codes, pair.to(tl.int64), column, (column < K) & active, unit, K)


@triton.jit
def round_nvfp4(
    x,
    indices,
    lengths,
    input_scale,
    batch,
    steps,
    codes,
    scales,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As :func:`round_fp8`; codes and block scales."""
    pair = tl.program_id(0) + tl.arange(0, 1)  # a block of one
    active = is_token(pair // TOP_K, lengths, batch, steps)
    unit = _scale(input_scale, indices, pair, active)
    block = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    source = (pair // TOP_K if OF_TOKENS else pair).to(tl.int64)
    inside = (block < K // BLOCK) & active
    rounding.round_nvfp4(x, source, codes, scales, pair.to(tl.int64), block, inside, unit, K)


@triton.jit
def _scale(input_scale, indices, pair, active):
    """The scale of a pair's expert; of a pair that is none, one."""
    expert = tl.load(indices + pair, active, 0)
    return tl.sum(tl.load(input_scale + expert, active, 1.0), 0)


ROUND = {"fp8": round_fp8, "nvfp4": round_nvfp4}
"""The functions by format."""
