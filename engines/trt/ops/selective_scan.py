# SPDX-License-Identifier: Apache-2.0
"""``SelectiveScan`` as products of matrices over chunks of tokens (arXiv:2405.21060, section 6).

The sequence is [pending | new]; tokens that do not count have d = 0, hence neither decay nor add. Within a chunk of Q
tokens outputs come from a masked Q x Q product, between chunks from a matrix of decays. Decoding is one chunk of all
pending and new tokens.

The state that a step leaves follows the tokens it commits. Rows that leave tokens pending have all their tokens in
the first chunk, which starts from the old state in any case, so one chain of chunk states serves both kinds of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from nemo_build.engines.trt.emitter import FLOAT, TO_END
from nemo_build.engines.trt.ops import Context, attributes_of
from nemo_build.engines.trt.phases import DECODE

OP = "SelectiveScan"

_HIDDEN = -1e30  # its exponential is zero


@dataclass(frozen=True)
class _Sizes:
    """H heads of width P and state N in G groups, chunks of Q tokens."""

    heads: int
    head_dim: int
    width: int
    groups: int
    chunk: int

    @property
    def per_group(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups


def lower(c: Context, node: onnx.NodeProto) -> None:
    """State ``[B, H, P, N]`` and ring ``[B, K, H*P+G*N+H]``, float32."""
    x, dt, b, cc, a_log, d_skip, dt_bias, state, ring, _, past, accepted, lengths = node.input
    y, state_out, ring_out = node.output
    g, pending = c.g, c.phase.pending
    heads, head_dim, width = (int(n) for n in c.shapes[state][1:])
    features = int(c.shapes[ring][2])
    s = _Sizes(heads, head_dim, width, (features - heads * head_dim - heads) // width, c.phase.scan_chunk)

    steps = _time_steps(c, dt, dt_bias, attributes_of(node))
    new = g.op("Where", c.is_valid(lengths, x), g.op("Concat", x, b, steps, axis=-1), g.number(0))
    is_kept = g.op("Less", g.ints(*range(pending)), g.unsqueeze(accepted, 1))
    old = g.op("Where", g.unsqueeze(is_kept, 2), ring, g.number(0))
    total = g.op("Add", g.op("Shape", x, start=1, end=2), g.ints(pending))
    tokens = _chunked(c, g.op("Concat", old, new, axis=1), total, s.chunk)
    queries = _chunked(c, g.pad(cc, 3, 1, pending, 0), total, s.chunk)

    inner = heads * head_dim
    parts = g.ops("Split", 3, tokens, g.ints(inner, s.groups * width, heads), axis=-1)
    xs, keys = g.reshape(parts[0], 0, 0, 0, heads, head_dim), _grouped(c, parts[1], s)
    query = _grouped(c, queries, s)
    a = g.op("Neg", g.op("Exp", g.cast(a_log, FLOAT)))
    is_new = g.unsqueeze(c.is_new(past, accepted), 1, 2, 3)
    start = g.op("Where", is_new, g.number(0), state)

    decay = _log_decay(c, parts[2], a)
    inside = _within_chunks(c, s, xs, parts[2], keys, query, decay)
    committed = _committed_steps(c, parts[2], lengths)
    decay_committed = _log_decay(c, committed, a)
    sums = _chunk_sums(c, s, xs, committed, keys, decay_committed)
    entering, final = _between_chunks(c, s, start, sums, g.slice(decay_committed, -1, TO_END, 3))
    across = _from_state(c, s, query, entering, decay)

    mixed = g.transpose(g.op("Add", inside, across), 0, 1, 3, 2, 4)
    flat = g.slice(g.reshape(mixed, 0, -1, heads, head_dim), pending, total, 1)
    skip = g.op("Mul", g.reshape(x, 0, 0, heads, head_dim), g.reshape(g.cast(d_skip, FLOAT), heads, 1))
    g.op("Reshape", g.op("Add", flat, skip), g.ints(0, 0, -1), out=y)
    active = g.unsqueeze(c.is_active(lengths), 1, 2, 3)
    g.op("Where", active, final, state, out=state_out)
    g.op("Identity", c.next_ring(new, ring, lengths), out=ring_out)


def _time_steps(c: Context, dt: str, bias: str, attributes: dict[str, float]) -> str:
    """``clamp(softplus(dt + bias))``, ``[B, L, H]``."""
    g = c.g
    steps = g.op("Softplus", g.op("Add", dt, g.cast(bias, FLOAT)))
    low, high = attributes.get("dt_min", 0.0), attributes.get("dt_max", math.inf)
    if low > 0:
        steps = g.op("Max", steps, g.number(low))
    return g.op("Min", steps, g.number(high)) if math.isfinite(high) else steps


def _chunked(c: Context, x: str, total: str, chunk: int) -> str:
    """`x` ``[B, K+L, F]`` with zeros behind it up to whole chunks, ``[B, chunks, Q, F]``; `total` is K+L."""
    g = c.g
    padded = g.pad(x, 3, 1, 0, chunk)
    if c.phase.name == DECODE:
        return g.unsqueeze(g.slice(padded, 0, chunk, 1), 1)
    chunks = g.op("Div", g.op("Add", total, g.ints(chunk - 1)), g.ints(chunk))
    shape = g.op("Concat", g.ints(0), chunks, g.ints(chunk, -1), axis=0)
    whole = g.slice(padded, 0, g.op("Mul", chunks, g.ints(chunk)), 1)
    return g.op("Reshape", whole, shape)


def _grouped(c: Context, x: str, s: _Sizes) -> str:
    """``[B, chunks, Q, G*N]`` as ``[B, chunks, G, Q, N]``."""
    return c.g.transpose(c.g.reshape(x, 0, 0, 0, s.groups, s.width), 0, 1, 3, 2, 4)


def _matmul(c: Context, a: str, b: str) -> str:
    """A product of float32 matrices; of many tokens, in the type of multiplications."""
    if c.phase.name == DECODE:
        return c.g.op("MatMul", a, b)
    return c.to_float(c.g.op("MatMul", c.to_compute(a), c.to_compute(b)))


def _log_decay(c: Context, steps: str, a: str) -> str:
    """Log of the decay from a chunk's start to each token, that token's included: ``[B, chunks, H, Q]``."""
    sums = c.g.op("CumSum", c.g.op("Mul", steps, a), c.g.integer(2))
    return c.g.transpose(sums, 0, 1, 3, 2)


def _committed_steps(c: Context, steps: str, lengths: str) -> str:
    """Time steps ``[B, chunks, Q, H]`` with those of tokens that stay pending made zero.

    Outside the first chunk, whatever is there belongs to a row that commits, or is zero already.
    """
    g, pending, chunk = c.g, c.phase.pending, c.phase.scan_chunk
    in_ring = g.constant(np.arange(chunk).reshape(1, 1, chunk, 1) < pending)
    is_committed = g.op("Or", in_ring, g.unsqueeze(c.commits(lengths), 1, 2, 3))
    return g.op("Where", is_committed, steps, g.number(0))


def _within_chunks(c: Context, s: _Sizes, xs: str, steps: str, keys: str, query: str, decay: str) -> str:
    """What tokens get from the tokens of their own chunk up to themselves: ``[B, chunks, H, Q, P]``."""
    g, q = c.g, s.chunk
    between = g.op("Sub", g.unsqueeze(decay, 4), g.unsqueeze(decay, 3))
    lower_half = g.constant(np.tril(np.ones((1, 1, 1, q, q), bool)))
    fading = g.op("Exp", g.op("Where", lower_half, between, g.number(_HIDDEN)))
    scores = _matmul(c, query, g.transpose(keys, 0, 1, 2, 4, 3))
    grouped = g.reshape(fading, 0, 0, s.groups, s.per_group, q, q)
    mask = g.reshape(g.op("Mul", g.unsqueeze(scores, 3), grouped), 0, 0, s.heads, q, q)
    values = g.transpose(g.op("Mul", xs, g.unsqueeze(steps, 4)), 0, 1, 3, 2, 4)
    return _matmul(c, mask, values)


def _chunk_sums(c: Context, s: _Sizes, xs: str, steps: str, keys: str, decay: str) -> str:
    """What each chunk adds to the state at its end: ``[B, chunks, H, P*N]``."""
    g = c.g
    fading = g.op("Exp", g.op("Sub", g.slice(decay, -1, TO_END, 3), decay))
    values = g.transpose(g.op("Mul", xs, g.unsqueeze(steps, 4)), 0, 1, 3, 4, 2)
    faded = g.op("Mul", values, g.unsqueeze(fading, 3))
    grouped = g.reshape(faded, 0, 0, s.groups, s.per_group * s.head_dim, s.chunk)
    return g.reshape(_matmul(c, grouped, keys), 0, 0, s.heads, s.head_dim * s.width)


def _between_chunks(c: Context, s: _Sizes, start: str, sums: str, totals: str) -> tuple[str, str]:
    """The states that enter the chunks ``[B, chunks, H, P*N]`` and the last one's ``[B, H, P, N]``.

    `start` is the state before the first chunk, `totals` ``[B, chunks, H, 1]`` each chunk's whole log decay. State i is
    the sum over j <= i of what chunk j - 1 added (of `start` for j = 0), faded by the chunks from j to i.
    """
    g = c.g
    first = g.reshape(start, 0, 1, s.heads, s.head_dim * s.width)
    if c.phase.name == DECODE:
        final = g.op("Add", g.op("Mul", first, g.op("Exp", totals)), sums)
        return first, g.reshape(final, 0, s.heads, s.head_dim, s.width)
    before = g.op("CumSum", g.pad(g.reshape(totals, 0, 0, s.heads), 3, 1, 1, 0), g.integer(1))
    by_head = g.transpose(before, 0, 2, 1)
    between = g.op("Sub", g.unsqueeze(by_head, 3), g.unsqueeze(by_head, 2))
    count = g.op("Squeeze", g.op("Shape", before, start=1, end=2), g.ints(0))
    order = g.op("Range", g.integer(0), count, g.integer(1))
    is_earlier = g.op("GreaterOrEqual", g.unsqueeze(order, 1), g.unsqueeze(order, 0))
    fading = g.op("Exp", g.op("Where", is_earlier, between, g.number(_HIDDEN)))
    added = g.transpose(g.op("Concat", first, sums, axis=1), 0, 2, 1, 3)
    states = g.op("MatMul", fading, added)
    entering = g.transpose(g.slice(states, 0, -1, 2), 0, 2, 1, 3)
    return entering, g.reshape(g.slice(states, -1, TO_END, 2), 0, s.heads, s.head_dim, s.width)


def _from_state(c: Context, s: _Sizes, query: str, entering: str, decay: str) -> str:
    """What tokens get from the state that enters their chunk: ``[B, chunks, H, Q, P]``."""
    g = c.g
    states = g.reshape(entering, 0, 0, s.groups, s.per_group * s.head_dim, s.width)
    read = _matmul(c, query, g.transpose(states, 0, 1, 2, 4, 3))
    split = g.transpose(g.reshape(read, 0, 0, s.groups, s.chunk, s.per_group, s.head_dim), 0, 1, 2, 4, 3, 5)
    heads = g.reshape(split, 0, 0, s.heads, s.chunk, s.head_dim)
    return g.op("Mul", heads, g.op("Exp", g.unsqueeze(decay, 4)))
