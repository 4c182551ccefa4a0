# SPDX-License-Identifier: Apache-2.0
"""``CausalConv1d`` as shifted products, with its window and pending inputs as one state tensor a row."""

from __future__ import annotations

import numpy as np
import onnx

from nemo_build.engines.trt.emitter import FLOAT, TO_END
from nemo_build.engines.trt.ops import Context

OP = "CausalConv1d"


def lower(c: Context, node: onnx.NodeProto) -> None:
    """State ``[B, W-1+K, C]``; see the op's reference for what is kept when."""
    x, weight, bias, state, _, past, accepted, lengths = node.input
    y, state_out = node.output
    g, (channels, _, taps) = c.g, c.shapes[weight]
    assert isinstance(taps, int), "weights have constant shapes"
    keep = taps - 1
    in_window = g.constant(np.arange(keep + c.phase.pending).reshape(1, -1, 1) < keep)
    is_blank = g.op("And", g.unsqueeze(c.is_new(past, accepted), 1, 2), in_window)
    kept = g.op("Where", is_blank, g.number(0), state)
    seq = g.op("Concat", g.take(kept, accepted, keep), x, axis=1)

    kernel = g.reshape(g.cast(weight, FLOAT), int(channels), taps)
    total = g.cast(bias, FLOAT) if bias else ""
    for tap in range(taps):
        end = tap - keep if tap < keep else TO_END
        factor = g.reshape(g.slice(kernel, tap, tap + 1, 1), -1)
        product = g.op("Mul", g.slice(seq, tap, end, 1), factor)
        total = g.op("Add", product, total) if total else product
    g.op("Mul", total, g.op("Sigmoid", total), out=y)

    start = g.op("Where", c.commits(lengths), lengths, g.integer(0))
    ring = c.next_ring(x, g.slice(state, keep, TO_END, 1), lengths)
    rows = g.op("Concat", g.take(seq, start, keep), ring, axis=1)
    g.op("Where", g.unsqueeze(c.is_active(lengths), 1, 2), rows, state, out=state_out)
