# SPDX-License-Identifier: Apache-2.0
"""``RoutedExperts`` for few tokens on a GPU: vectors times the rows of the chosen experts, choice by choice.

Each token is computed by itself, in one order of operations, so to the bit it does not depend on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu.stored import add_products, load_group_scales, load_values, load_vector
from nemo_build.plugins.gpu.tokens import is_token


@triton.jit
def step_up(
    x,
    indices,
    lengths,
    weight,
    weight_scale,
    weight_scale_2,
    input_scale,
    x_scale,
    batch,
    steps,
    hidden,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``relu(up x)^2``: ``BLOCK_N`` values of one pair of token and choice.

    Numbers ``x`` have a row for each token, codes one for each pair.
    """
    pair = tl.program_id(0)
    token = pair // TOP_K + tl.arange(0, 1)  # a block of one
    active = is_token(token, lengths, batch, steps)
    if tl.max(active.to(tl.int32), 0) == 0:
        return
    expert = tl.load(indices + pair)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < ROWS
    at = expert * ROWS + row
    source = (token if X_FORMAT == "plain" else pair + tl.arange(0, 1)).to(tl.int64)
    sums = _product(
        x,
        x_scale,
        source,
        active,
        weight,
        weight_scale,
        at,
        there,
        K,
        FORMAT,
        X_FORMAT,
        GROUP,
        BLOCK_N,
        BLOCK_K,
    )
    factor = expert_factor(weight_scale, weight_scale_2, input_scale, expert, FACTOR, FORMAT)
    value = tl.maximum(sums * factor, 0.0)
    tl.store(hidden + pair.to(tl.int64) * ROWS + row, (value * value).to(hidden.dtype.element_ty), there)


@triton.jit
def step_down(
    hidden,
    indices,
    weights,
    lengths,
    weight,
    weight_scale,
    weight_scale_2,
    input_scale,
    x_scale,
    batch,
    steps,
    y,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` outputs of one token: its choices' down projections, weighted, in the order of the choices."""
    token = tl.program_id(0)
    active = is_token(token + tl.arange(0, 1), lengths, batch, steps)
    if tl.max(active.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < ROWS
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(indices + pair)
        source = (pair + tl.arange(0, 1)).to(tl.int64)
        at = expert * ROWS + row
        sums = _product(
            hidden,
            x_scale,
            source,
            active,
            weight,
            weight_scale,
            at,
            there,
            K,
            FORMAT,
            X_FORMAT,
            GROUP,
            BLOCK_N,
            BLOCK_K,
        )
        factor = expert_factor(weight_scale, weight_scale_2, input_scale, expert, FACTOR, FORMAT)
        total += tl.load(weights + pair).to(tl.float32) * (sums * factor)
    tl.store(y + token.to(tl.int64) * ROWS + row, total.to(y.dtype.element_ty), there)


@triton.jit
def _product(
    x,
    x_scale,
    token,
    active,
    weight,
    weight_scale,
    row,
    there,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products ``[BLOCK_N]`` of rows of a weight with one token, without the scales of the whole."""
    sums = tl.zeros((BLOCK_N, BLOCK_K // GROUP), tl.float32)
    for k in range(0, K, BLOCK_K):
        values = load_values(weight, row, there, k, K, BLOCK_K, FORMAT, GROUP)
        scales = None
        if FORMAT == "nvfp4":
            scales = load_group_scales(weight_scale, row, there, k, K, BLOCK_K, GROUP)
        vector = load_vector(x, x_scale, token, active, k, K, BLOCK_K, X_FORMAT, GROUP)
        sums = add_products(sums, values, scales, vector)
    return tl.sum(sums, 1)


@triton.jit
def expert_factor(
    weight_scale, weight_scale_2, input_scale, expert, FACTOR: tl.constexpr, FORMAT: tl.constexpr
):
    """What an expert's sums are multiplied by: its scales, and the power of two that decoding left out."""
    factor = tl.full((), FACTOR, tl.float32)
    if FORMAT == "fp8":
        factor *= tl.load(weight_scale + expert)
    if FORMAT == "nvfp4":
        factor *= tl.load(weight_scale_2 + expert)
    if input_scale is not None:
        factor *= tl.load(input_scale + expert)
    return factor
