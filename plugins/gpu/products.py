# SPDX-License-Identifier: Apache-2.0
"""Products of stored weights with tokens, in GPU kernels: tiles of both, for tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu.stored import BLOCK, as_bytes, load_tile

NEEDED = {"fp8": {"least_sm": 89, "least_ptx": 84}, "nvfp4": {"least_sm": 100, "least_ptx": 88}}
"""What a kernel with :func:`code_products` of a format needs, as arguments of ``Kernel``."""


@triton.jit
def tile_products(
    weight,
    weight_scale,
    row,
    there,
    x,
    x_scale,
    token,
    active,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums ``[R, T]`` of rows of a weight times tokens, without the scales of the whole; see ``TILE_FACTORS``.

    Weights are the left operand, which may stay in registers. Both are exact in the type they are multiplied in, that
    of ``x``, or float16 where it has codes.

    Args:
        weight, weight_scale: A weight ``[..., K]`` as it is stored.
        row, there: Which rows of it, int64 and bool ``[R]``.
        x, x_scale: Tokens ``[M, K]``, stored likewise.
        token, active: Which of them, int64 and bool ``[T]``.
        K: Columns of both.
        FORMAT, X_FORMAT: How they are stored.
        GROUP: See ``group_size``.
        BLOCK_K: Columns at a time.
    """
    sums = tl.zeros((row.shape[0], token.shape[0]), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = load_tile(weight, weight_scale, row, there, k, K, BLOCK_K, FORMAT, GROUP)
        right = load_tile(x, x_scale, token, active, k, K, BLOCK_K, X_FORMAT, GROUP)
        sums = tl.dot(left.to(tl.float32).to(right.dtype), tl.trans(right), sums, input_precision="ieee")
    return sums


@triton.jit
def code_products(
    weight,
    weight_scale,
    row,
    there,
    x,
    x_scale,
    token,
    active,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As :func:`tile_products`, with codes as operands of tensor cores: of E4M3, or of E2M1 with block scales.

    The sums lack no power of two.
    """
    sums = tl.zeros((row.shape[0], token.shape[0]), tl.float32)
    for k in range(0, K, BLOCK_K):
        if FORMAT == "fp8":
            left = _bytes(weight, row, there, k, K, BLOCK_K).to(tl.float8e4nv, bitcast=True)
            right = _bytes(x, token, active, k, K, BLOCK_K).to(tl.float8e4nv, bitcast=True)
            # Hopper adds up fewer bits within a tile of columns; tiles are added in float32.
            sums = tl.dot(left, tl.trans(right), sums, max_num_imprecise_acc=BLOCK_K)
        else:
            left = _bytes(weight, row, there, k // 2, K // 2, BLOCK_K // 2)
            right = _bytes(x, token, active, k // 2, K // 2, BLOCK_K // 2)
            left_scale = _bytes(weight_scale, row, there, k // BLOCK, K // BLOCK, BLOCK_K // BLOCK)
            right_scale = _bytes(x_scale, token, active, k // BLOCK, K // BLOCK, BLOCK_K // BLOCK)
            left_scale = left_scale.to(tl.float8e4nv, bitcast=True)
            right_scale = right_scale.to(tl.float8e4nv, bitcast=True)
            sums = tl.dot_scaled(left, left_scale, "e2m1", tl.trans(right), right_scale, "e2m1", sums)
    return sums


@triton.jit
def _bytes(tensor, row, there, column, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Bytes ``[R, BLOCK_WIDTH]`` of some rows of ``[..., WIDTH]`` from a column on; zero outside."""
    at = column + tl.arange(0, BLOCK_WIDTH)
    return tl.load(
        as_bytes(tensor) + row[:, None] * WIDTH + at[None, :], there[:, None] & (at < WIDTH)[None, :], 0
    )
