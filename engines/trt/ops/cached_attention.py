# SPDX-License-Identifier: Apache-2.0
"""``CachedAttention`` as TensorScatter and Attention, or, with a window or sinks, as products and a softmax.

The new tokens of a row, padding included, are written from position ``past`` on; those of a row without new tokens to
the room behind the context, so that they touch nothing that is pending.

With a causal Attention, query i sees keys up to ``past + i``: a mask aligned to the end of ``past + L`` keys; with one
that is not, all up to ``past + lengths``. The ONNX node says so by ``nonpad_kv_seqlen`` and ``is_causal``, which the
compiler's parser drops; :mod:`~nemo_build.engines.trt.network` sets both on the network.

Products and a softmax stand where Attention has no words for what is asked. Of a window, only its positions are read,
however long the context is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx

from nemo_build.engines.trt.emitter import FLOAT
from nemo_build.engines.trt.ops import Context, attributes_of

OP = "CachedAttention"

KEY_LENGTHS = "kv_lengths"
"""Name of the value with how many keys each row's queries are aligned to ``[B]``, int64."""

_LOWEST = -3.0e38


class _Caches(NamedTuple):
    """The caches with the new tokens, ``[B, heads, room, width]``."""

    keys: str
    values: str
    heads: int
    room: int
    width: int


class _Rows(NamedTuple):
    """Where a step's tokens are: tokens before each row's ``[B]``, new ones ``[B]``, and any value ``[B, L, ...]``."""

    past: str
    lengths: str
    like: str


def lower(c: Context, node: onnx.NodeProto) -> None:
    """Caches ``[B, Hkv, M, D]``, in the type of multiplications."""
    attributes = attributes_of(node)
    q, k, v, key_cache, value_cache, _, past, lengths, sinks, cos, sin = [*node.input, *[""] * 3][:11]
    y, key_out, value_out = node.output
    rows = _Rows(past, lengths, q)
    heads, room, width = (int(n) for n in c.shapes[key_cache][1:])
    caches = _Caches(key_out, value_out, heads, room, width)
    at = c.g.op("Where", c.is_active(lengths), past, c.g.integer(c.phase.context))
    new = c.to_compute(_turned(c, _by_head(c, k, heads, width), rows, (cos, sin)))
    c.g.op("TensorScatter", key_cache, new, at, out=key_out, axis=2)
    new = c.to_compute(_by_head(c, v, heads, width))
    c.g.op("TensorScatter", value_cache, new, at, out=value_out, axis=2)
    if y not in c.used:
        return
    scaled = c.g.op("Mul", q, c.g.number(float(attributes["scale"])))
    queries = c.to_compute(_turned(c, _by_head(c, scaled, -1, width), rows, (cos, sin)))
    window, is_causal = attributes.get("window", 0), bool(attributes.get("causal", 1))
    window = window if window < room else 0
    if window or sinks:
        mixed = _softmax(c, queries, caches, rows, sinks, window, is_causal)
    else:
        mixed = _fused(c, queries, caches, rows, is_causal)
    flat = c.g.reshape(c.g.transpose(mixed, 0, 2, 1, 3), 0, 0, -1)
    c.g.op("Identity", c.to_float(flat), out=y)


def _by_head(c: Context, x: str, heads: int, width: int) -> str:
    """``[B, L, heads * D]`` as ``[B, heads, L, D]``."""
    return c.g.transpose(c.g.reshape(x, 0, 0, heads, width), 0, 2, 1, 3)


def _turned(c: Context, x: str, rows: _Rows, tables: tuple[str, str]) -> str:
    """`x` ``[B, H, L, D]`` turned by its tokens' positions, if there are tables ``[>=M, R/2]``."""
    if not all(tables):
        return x
    size, half = (int(n) for n in c.shapes[tables[0]])
    within = c.g.op("Min", c.positions(rows.past, rows.like), c.g.integer(size - 1))
    return c.g.op("RotaryEmbedding", x, *tables, within, rotary_embedding_dim=2 * half)


def _fused(c: Context, q: str, caches: _Caches, rows: _Rows, is_causal: bool) -> str:
    """Queries ``[B, Hq, L, D]``, scaled, over what is filled of the caches."""
    # A fused kernel takes 16-bit types only; in float32 the compiler has to take the op apart.
    extra: dict[str, Any] = {"TRT_decomposable": 1} if c.compute == FLOAT else {}
    lengths = _key_lengths(c, rows, is_causal)
    inputs = (q, caches.keys, caches.values, "", "", "", lengths)
    return c.g.op("Attention", *inputs, is_causal=int(is_causal), scale=1.0, **extra)


def _key_lengths(c: Context, rows: _Rows, is_causal: bool) -> str:
    """``past + L`` or, where new tokens see each other, ``past + lengths``, at least one; once a graph."""
    if all(KEY_LENGTHS not in n.output for n in c.g.nodes):
        if is_causal:
            c.g.op("Add", rows.past, c.g.op("Shape", rows.like, start=1, end=2), out=KEY_LENGTHS)
        else:
            end = c.g.op("Add", rows.past, rows.lengths)
            c.g.op("Max", end, c.g.integer(1), out=KEY_LENGTHS)
    return KEY_LENGTHS


def _softmax(
    c: Context,
    q: str,
    caches: _Caches,
    rows: _Rows,
    sinks: str,
    window: int,
    is_causal: bool,
) -> str:
    """Queries ``[B, Hq, L, D]``, scaled, over the positions that some query of a row may see."""
    g = c.g
    keys, values, heads, room, width = caches
    steps = g.op("Shape", rows.like, start=1, end=2)
    if window:
        span = _window(c, rows, steps, window)
        keys, values = (_gathered(c, cache, span, heads) for cache in (keys, values))
    else:
        span = g.constant(np.arange(room)[None])
    is_written = g.op("Less", span, g.unsqueeze(g.op("Add", rows.past, rows.lengths), 1))
    # What was never written may be anything, and a weight of zero does not hide a NaN.
    values = g.op("Where", g.unsqueeze(is_written, 1, 3), values, c.to_compute(g.number(0)))

    grouped = g.reshape(q, 0, heads, -1, width)
    raw = c.to_float(g.op("MatMul", grouped, g.transpose(keys, 0, 1, 3, 2)))
    count = g.op("Shape", span, start=1, end=2)
    by_query = g.op("Concat", g.ints(0, heads, -1), steps, count, axis=0)
    seen = _seen(c, span, is_written, rows, window, is_causal)
    masked = g.op("Where", seen, g.op("Reshape", raw, by_query), g.number(_LOWEST))
    weights = c.to_compute(_weights(c, masked, sinks, heads))
    flat = g.op("Reshape", weights, g.op("Concat", g.ints(0, heads, -1), count, axis=0))
    mixed = g.op("MatMul", flat, values)
    by_head = g.op("Concat", g.ints(0, -1), steps, g.ints(width), axis=0)
    return g.op("Reshape", mixed, by_head)


def _window(c: Context, rows: _Rows, steps: str, window: int) -> str:
    """Positions that some query of a row may see ``[B, window + L - 1]``; the last may be after all that is written."""
    g = c.g
    first = g.op("Max", g.op("Sub", rows.past, g.integer(window - 1)), g.integer(0))
    count = g.op("Squeeze", g.op("Add", steps, g.integer(window - 1)), g.ints(0))
    return g.op("Add", g.unsqueeze(first, 1), g.op("Range", g.integer(0), count, g.integer(1)))


def _gathered(c: Context, cache: str, span: str, heads: int) -> str:
    """Positions `span` ``[B, N]`` of a cache ``[B, Hkv, M, D]``: ``[B, Hkv, N, D]``."""
    at = c.g.op("Expand", c.g.unsqueeze(span, 1, 3), c.g.ints(1, heads, 1, 1))
    return c.g.op("GatherND", cache, at, batch_dims=2)


def _seen(c: Context, span: str, is_written: str, rows: _Rows, window: int, is_causal: bool) -> str:
    """Which of the positions `span` each query sees ``[B, 1, 1, L, N]``."""
    g = c.g
    position, other = g.unsqueeze(c.positions(rows.past, rows.like), 2), g.unsqueeze(span, 1)
    seen = g.unsqueeze(is_written, 1)
    if is_causal:
        seen = g.op("And", seen, g.op("LessOrEqual", other, position))
    if window:
        seen = g.op("And", seen, g.op("Greater", other, g.op("Sub", position, g.integer(window))))
    return g.unsqueeze(seen, 1, 2)


def _weights(c: Context, scores: str, sinks: str, heads: int) -> str:
    """Softmax of `scores` ``[B, Hkv, G, L, N]``, float32; a sink is one more term of its head's denominator."""
    g = c.g
    if not sinks:
        return g.op("Softmax", scores, axis=-1)
    sink = g.reshape(g.cast(sinks, FLOAT), 1, heads, -1, 1, 1)
    top = g.op("Max", g.op("ReduceMax", scores, g.ints(-1), keepdims=1), sink)
    terms = g.op("Exp", g.op("Sub", scores, top))
    total = g.op("ReduceSum", terms, g.ints(-1), keepdims=1)
    return g.op("Div", terms, g.op("Add", total, g.op("Exp", g.op("Sub", sink, top))))
