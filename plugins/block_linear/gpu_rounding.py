# SPDX-License-Identifier: Apache-2.0
"""The nodes that round the activations of ``BlockLinear``, by the rules of ``plugins/formats/activations.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu.rounding import to_e2m1, to_e4m3
from nemo_build.plugins.gpu.stored import BLOCK, e4m3_of_bytes
from nemo_build.plugins.gpu.tokens import is_token


@triton.jit
def round_fp8(x, lengths, input_scale, batch, steps, codes, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """E4M3 codes of ``BLOCK_K`` columns of one token, ``e4m3(x / input_scale)``."""
    token = tl.program_id(0) + tl.arange(0, 1)  # a block of one
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (column < K) & is_token(token, lengths, batch, steps)
    at = token.to(tl.int64) * K + column
    ratio = tl.div_rn(tl.load(x + at, inside, 0.0).to(tl.float32), tl.load(input_scale))
    tl.store(codes + at, to_e4m3(tl.clamp(ratio, -448.0, 448.0)), inside)


@triton.jit
def round_nvfp4(x, lengths, input_scale, batch, steps, codes, scales, K: tl.constexpr, BLOCKS: tl.constexpr):
    """E2M1 codes and E4M3 block scales of ``BLOCKS`` blocks of one token, below the one static scale."""
    token = tl.program_id(0) + tl.arange(0, 1)  # a block of one
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < K // BLOCK) & is_token(token, lengths, batch, steps)
    at = token.to(tl.int64) * (K // BLOCK) + block
    column = at[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + column, inside[:, None], 0.0).to(tl.float32)
    unit = tl.load(input_scale)
    wanted = tl.div_rn(tl.max(tl.abs(value), 1), unit * 6.0)
    scale = to_e4m3(tl.clamp(wanted, 1.0 / 512, 448.0))  # never zero
    step = e4m3_of_bytes(scale).to(tl.float32) * 256.0 * unit
    code = to_e2m1(tl.div_rn(value, tl.broadcast_to(step[:, None], (BLOCKS, BLOCK))))
    low, high = tl.split(tl.reshape(code, (BLOCKS, BLOCK // 2, 2)))
    byte = at[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(codes + byte, low | (high << 4), inside[:, None])
    tl.store(scales + at, scale, inside)
