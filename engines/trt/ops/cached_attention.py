# SPDX-License-Identifier: Apache-2.0
"""``CachedAttention`` as TensorScatter and Attention.

The new tokens of a row, padding included, are written from position ``past`` on; those of a row without new tokens to
the room behind the context, so that they touch nothing that is pending. Query i sees keys up to
``past + i``: a causal mask aligned to the end of ``past + L`` keys. The ONNX node says so by ``nonpad_kv_seqlen``
and ``is_causal``, which the compiler's parser drops; :mod:`~nemo_build.engines.trt.network` sets both on the
network.
"""

from __future__ import annotations

from typing import Any

import onnx

from nemo_build.engines.trt.emitter import FLOAT
from nemo_build.engines.trt.ops import Context, attributes_of, refuse

OP = "CachedAttention"

KEY_LENGTHS = "kv_lengths"
"""Name of the value with how many keys each row's queries are aligned to ``[B]``, int64."""


def lower(c: Context, node: onnx.NodeProto) -> None:
    """Caches ``[B, Hkv, M, D]``, in the type of multiplications."""
    attributes = attributes_of(node)
    for name, known in (("window", 0), ("causal", 1)):
        if attributes.get(name, known) != known:
            raise refuse(node, f"{name} is {attributes[name]}")
    if any(node.input[8:]):
        raise refuse(node, "it has sinks or rotary tables")
    q, k, v, key_cache, value_cache, _, past, lengths = node.input[:8]
    y, key_out, value_out = node.output
    g, (_, kv_heads, _, head_dim) = c.g, c.shapes[key_cache]
    kv_heads, head_dim = int(kv_heads), int(head_dim)

    def heads(x: str, count: int) -> str:
        split = g.op("Reshape", c.to_compute(x), g.ints(0, 0, count, head_dim))
        return g.transpose(split, 0, 2, 1, 3)

    at = g.op("Where", c.is_active(lengths), past, g.integer(c.phase.context))
    for new, cache, out in ((k, key_cache, key_out), (v, value_cache, value_out)):
        g.op("TensorScatter", cache, heads(new, kv_heads), at, out=out, axis=2)
    # A fused kernel takes 16-bit types only; in float32 the compiler has to take the op apart.
    extra: dict[str, Any] = {"TRT_decomposable": 1} if c.compute == FLOAT else {}
    mixed = g.op(
        "Attention",
        heads(g.op("Mul", q, g.number(float(attributes["scale"]))), -1),
        key_out,
        value_out,
        "",
        "",
        "",
        _key_lengths(c, past, q),
        is_causal=1,
        scale=1.0,
        **extra,
    )
    flat = g.reshape(g.transpose(mixed, 0, 2, 1, 3), 0, 0, -1)
    g.op("Identity", c.to_float(flat), out=y)


def _key_lengths(c: Context, past: str, q: str) -> str:
    """``past + L``, once a graph."""
    if all(KEY_LENGTHS not in n.output for n in c.g.nodes):
        c.g.op("Add", past, c.g.op("Shape", q, start=1, end=2), out=KEY_LENGTHS)
    return KEY_LENGTHS
