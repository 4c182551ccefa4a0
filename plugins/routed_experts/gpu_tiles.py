# SPDX-License-Identifier: Apache-2.0
"""``RoutedExperts`` for many tokens on a GPU: pairs of token and choice sorted by expert, multiplied in tiles.

Nothing is added with atomics: each pair's output has a place of its own, and the choices of a token are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu.products import code_products, tile_products
from nemo_build.plugins.gpu.tokens import is_token
from nemo_build.plugins.routed_experts.gpu_steps import expert_factor


@triton.jit
def route(
    indices,
    lengths,
    batch,
    steps,
    order,
    offsets,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """An expert's part of the sorted pairs: where it begins, and its pairs in their order.

    A program reads all choices twice, once to see how many go to experts before its own, and once to place its pairs.
    That needs neither atomics nor other programs' results. Pairs of padding tokens are nowhere in ``order``.
    """
    expert = tl.program_id(0)
    pairs = batch * steps * TOP_K
    smaller = tl.zeros((BLOCK_PAIRS,), tl.int32)
    same = tl.zeros((BLOCK_PAIRS,), tl.int32)
    for first in range(0, pairs, BLOCK_PAIRS):
        pair = first + tl.arange(0, BLOCK_PAIRS)
        chosen = _chosen(indices, lengths, pair, batch, steps, EXPERTS, TOP_K)
        smaller += (chosen < expert).to(tl.int32)
        same += (chosen == expert).to(tl.int32)
    place = tl.sum(smaller, 0)
    tl.store(offsets + expert, place)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, place + tl.sum(same, 0))
    for first in range(0, pairs, BLOCK_PAIRS):
        pair = first + tl.arange(0, BLOCK_PAIRS)
        mine = (_chosen(indices, lengths, pair, batch, steps, EXPERTS, TOP_K) == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order + place + rank, pair, mine != 0)
        place += tl.sum(mine, 0)


@triton.jit
def _chosen(indices, lengths, pair, batch, steps, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """The experts of some pairs; ``EXPERTS`` for what is none."""
    there = is_token(pair // TOP_K, lengths, batch, steps)
    return tl.load(indices + pair, there, EXPERTS).to(tl.int32)


@triton.jit
def tile(
    x,
    order,
    offsets,
    weight,
    weight_scale,
    weight_scale_2,
    input_scale,
    x_scale,
    y,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    UP: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` outputs of ``BLOCK_PAIRS`` sorted pairs of one expert; ``relu(.)^2`` of them if ``UP``.

    Inputs are gathered: up, numbers from the tokens, else from the pairs. Outputs go to the pairs. There are as many
    programs as tiles at worst; those left over do nothing.
    """
    expert, first, stop = _tile_of(tl.program_id(1), offsets, EXPERTS, BLOCK_EXPERTS, BLOCK_PAIRS)
    if expert == EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_PAIRS)
    active = place < stop
    pair = tl.load(order + place, active, 0)
    source = (pair // TOP_K if UP and X_FORMAT == "plain" else pair).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < ROWS
    at = expert.to(tl.int64) * ROWS + row
    if CODES:
        sums = code_products(weight, weight_scale, at, there, x, x_scale, source, active, K, FORMAT, BLOCK_K)
    else:
        sums = tile_products(
            weight, weight_scale, at, there, x, x_scale, source, active, K, FORMAT, X_FORMAT, GROUP, BLOCK_K
        )
    sums *= expert_factor(weight_scale, weight_scale_2, input_scale, expert, FACTOR, FORMAT)
    if UP:
        sums = tl.maximum(sums, 0.0)
        sums *= sums
    mask = there[:, None] & active[None, :]
    tl.store(y + pair.to(tl.int64)[None, :] * ROWS + row[:, None], sums.to(y.dtype.element_ty), mask)


@triton.jit
def _tile_of(index, offsets, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """The expert of a tile, the place where the tile begins, and that where the expert's pairs end.

    Tiles are counted over all experts, of which each has as many as its pairs fill. Past the last, the expert is
    ``EXPERTS``.
    """
    expert = tl.arange(0, BLOCK_EXPERTS)
    begin = tl.load(offsets + expert, expert < EXPERTS, 0)
    end = tl.load(offsets + expert + 1, expert < EXPERTS, 0)
    tiles = (end - begin + (BLOCK_PAIRS - 1)) // BLOCK_PAIRS
    until = tl.cumsum(tiles, 0)
    found = tl.sum(((until <= index) & (expert < EXPERTS)).to(tl.int32), 0)
    mine = expert == found
    first = tl.sum(tl.where(mine, begin + (index - until + tiles) * BLOCK_PAIRS, 0), 0)
    return found, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def combine(
    outputs, weights, lengths, batch, steps, y, ROWS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """``BLOCK_N`` outputs of one token: those of its pairs, weighted, in the order of the choices."""
    token = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)  # a block of one
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < ROWS) & is_token(token, lengths, batch, steps)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        share = tl.load(weights + pair + row * 0, inside, 0.0).to(tl.float32)
        total += share * tl.load(outputs + pair * ROWS + row, inside, 0.0)
    tl.store(y + token * ROWS + row, total.to(y.dtype.element_ty), inside)
