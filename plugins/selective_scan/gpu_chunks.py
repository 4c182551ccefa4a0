# SPDX-License-Identifier: Apache-2.0
"""``SelectiveScan`` over chunks of many tokens: the state space duality of arXiv:2405.21060, section 6.

Within a chunk that begins with state h, with l_t the sum of d_s a up to and including t,

    y_t = exp(l_t) h C_t + sum_(s <= t) (C_t . B_s) exp(l_t - l_s) d_s x_s + d_skip x_t,

and what the chunk adds to the state is sum_s exp(l_end - l_s) d_s x_s B_s^T. Four launches compute this:
``chunk_decays`` gives d and l, ``chunk_states`` what each chunk adds, ``pass_states`` the state at the beginning of
each chunk, one after the other, and ``chunk_outputs`` y. Past a row's length d is zero, so those tokens change nothing.

Tensors between them are float32. ``PRECISION`` says how tensor cores multiply such: with 10 bits of mantissa (tf32)
where activations have no more than that, so that those stay exact; else as three products of such parts (tf32x3), which
is about float32.
"""

import triton
import triton.language as tl

from nemo_build.plugins.gpu.pending import stays_pending
from nemo_build.plugins.selective_scan.gpu_math import decay_rate, rounded, time_step


@triton.jit
def chunk_decays(
    dt,
    a_log,
    dt_bias,
    lengths,
    steps,
    d,
    decays,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Time steps d and sums of d a of some heads in a chunk, both [B, chunks, H, chunk]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    head = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    n = tl.load(lengths + row).to(tl.int32) - chunk * CHUNK
    if n <= 0:
        return
    time = tl.arange(0, CHUNK)
    there = head < HEADS
    token = (row.to(tl.int64) * steps + chunk * CHUNK + time) * HEADS
    inside = (time < n)[:, None] & there[None, :]
    raw = tl.load(dt + token[:, None] + head[None, :], inside, 0.0).to(tl.float32)
    bias = tl.load(dt_bias + head, there, 0.0)
    sizes = tl.where(inside, time_step(raw + bias[None, :], LOW, HIGH), 0.0)
    rate = decay_rate(a_log, tl.where(there, head, 0))
    total = tl.cumsum(sizes * rate[None, :], axis=0)
    chunks = (steps + CHUNK - 1) // CHUNK
    at = ((row.to(tl.int64) * chunks + chunk) * HEADS + head[None, :]) * CHUNK + time[:, None]
    tl.store(d + at, sizes, there[None, :])
    tl.store(decays + at, total, there[None, :])


@triton.jit
def chunk_states(
    x,
    b,
    d,
    decays,
    lengths,
    steps,
    chunks,
    states,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
):
    """What the tokens of a chunk add to a head's state, [B, chunks, H, P, N]."""
    row, head, chunk = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    group = head // (HEADS // GROUPS)
    n = tl.load(lengths + row).to(tl.int32) - chunk * CHUNK
    if n <= 0:
        return
    p = tl.arange(0, BLOCK_P)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = (row.to(tl.int64) * chunks + chunk) * HEADS + head
    end = tl.load(decays + place * CHUNK + CHUNK - 1)
    added = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, tl.minimum(n, CHUNK), BLOCK_TIME):
        time = first + tl.arange(0, BLOCK_TIME)
        token = row.to(tl.int64) * steps + chunk * CHUNK + time
        weight = tl.exp(end - tl.load(decays + place * CHUNK + time)) * tl.load(d + place * CHUNK + time)
        inputs = (token * HEADS + head) * HEAD_DIM
        inside = (p < HEAD_DIM)[:, None] & (time < n)[None, :]
        xs = tl.load(x + inputs[None, :] + p[:, None], inside, 0.0).to(tl.float32) * weight[None, :]
        inputs = (token * GROUPS + group) * WIDTH
        within = (time < n)[:, None] & (column < WIDTH)[None, :]
        bs = tl.load(b + inputs[:, None] + column[None, :], within, 0.0).to(tl.float32)
        added = tl.dot(rounded(xs, PRECISION), bs, added, input_precision=PRECISION)
    at = (place * HEAD_DIM + p[:, None]) * WIDTH + column[None, :]
    tl.store(states + at, added, (p < HEAD_DIM)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def pass_states(
    states,
    decays,
    a_log,
    state,
    pending,
    slots,
    past,
    accepted,
    lengths,
    chunks,
    entering,
    state_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    RING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state at the beginning of each chunk, [B, chunks, H, P, N], and the slot's after the step.

    A program has some elements of a head's state. The accepted pending tokens come before the first chunk.
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    n = tl.load(lengths + row).to(tl.int32)
    if n == 0:
        return
    SIZE: tl.constexpr = HEAD_DIM * WIDTH
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = element < SIZE
    slot = tl.load(slots + row)
    done = tl.load(accepted + row).to(tl.int32)
    known = tl.where(tl.load(past + row) == done, 0, SIZE)  # a new sequence has no state
    stored = (slot * HEADS + head) * SIZE + element
    h = tl.load(state + stored, element < known, 0.0)
    if RING > 0:
        rate = decay_rate(a_log, head)
        at_x = head * HEAD_DIM + element // WIDTH
        at_b = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * WIDTH + element % WIDTH
        FEATURES: tl.constexpr = HEADS * HEAD_DIM + GROUPS * WIDTH + HEADS
        for t in range(done):
            token = pending + (slot * RING + t) * FEATURES
            size = tl.load(token + FEATURES - HEADS + head)
            added = size * tl.load(token + at_x, there, 0.0) * tl.load(token + at_b, there, 0.0)
            h = tl.fma(h, tl.exp(size * rate) + tl.zeros_like(h), added)
    committed = h
    for chunk in range((n + CHUNK - 1) // CHUNK):
        place = (row.to(tl.int64) * chunks + chunk) * HEADS + head
        tl.store(entering + place * SIZE + element, h, there)
        decay = tl.exp(tl.load(decays + place * CHUNK + CHUNK - 1))
        h = tl.fma(h, decay + tl.zeros_like(h), tl.load(states + place * SIZE + element, there, 0.0))
    if stays_pending(n, RING):
        h = committed
    tl.debug_barrier()  # other threads may still be reading what is written now
    tl.store(state_out + stored, h, there)


@triton.jit
def chunk_outputs(
    x,
    b,
    c,
    d_skip,
    d,
    decays,
    entering,
    lengths,
    steps,
    chunks,
    y,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
):
    """Outputs of some tokens of a chunk: from the state before it, and from its tokens up to each."""
    row, head, chunk = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    group = head // (HEADS // GROUPS)
    n = tl.load(lengths + row).to(tl.int32) - chunk * CHUNK
    start = tl.program_id(2) * BLOCK_TIME
    if start >= n:
        return
    p, column = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    place = (row.to(tl.int64) * chunks + chunk) * HEADS + head
    d += place * CHUNK
    decays += place * CHUNK
    token = row.to(tl.int64) * steps + chunk * CHUNK
    x += (token * HEADS + head) * HEAD_DIM
    b += (token * GROUPS + group) * WIDTH
    c += (token * GROUPS + group) * WIDTH
    y += (token * HEADS + head) * HEAD_DIM

    time = start + tl.arange(0, BLOCK_TIME)
    outputs = time[:, None] * (HEADS * HEAD_DIM) + p[None, :]
    mine = (time < n)[:, None] & (p < HEAD_DIM)[None, :]
    inside = (time < n)[:, None] & (column < WIDTH)[None, :]
    cs = tl.load(c + time[:, None] * (GROUPS * WIDTH) + column[None, :], inside, 0.0)
    sums = tl.load(decays + time)
    inside = (column < WIDTH)[:, None] & (p < HEAD_DIM)[None, :]
    h = tl.load(entering + place * (HEAD_DIM * WIDTH) + column[:, None] + p[None, :] * WIDTH, inside, 0.0)
    h = rounded(h, PRECISION)
    result = tl.dot(cs.to(tl.float32), h, input_precision=PRECISION) * tl.exp(sums)[:, None]
    for first in range(0, start + BLOCK_TIME, BLOCK_TIME):
        past = first + tl.arange(0, BLOCK_TIME)
        within = (column < WIDTH)[:, None] & (past < n)[None, :]
        bs = tl.load(b + past[None, :] * (GROUPS * WIDTH) + column[:, None], within, 0.0)
        between = tl.where(
            time[:, None] >= past[None, :], sums[:, None] - tl.load(decays + past)[None, :], -1e30
        )
        weights = tl.exp(between) * tl.load(d + past)[None, :]
        scores = tl.dot(cs, bs, input_precision=PRECISION) * weights
        here = (past < n)[:, None] & (p < HEAD_DIM)[None, :]
        xs = tl.load(x + past[:, None] * (HEADS * HEAD_DIM) + p[None, :], here, 0.0).to(tl.float32)
        result = tl.dot(rounded(scores, PRECISION), xs, result, input_precision=PRECISION)
    skipped = tl.load(x + outputs, mine, 0.0).to(tl.float32) * tl.load(d_skip + head)
    tl.store(y + outputs, (result + skipped).to(y.dtype.element_ty), mine)
