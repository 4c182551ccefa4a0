# SPDX-License-Identifier: Apache-2.0
"""``SelectiveScan`` as kernel nodes: token by token when decoding, over chunks of tokens for prompts.

When decoding, tokens are taken one after the other by the same operations, pending ones of the step before as well, so
what a token gives does not depend on how many are verified with it, and a committed draft leaves the state that
decoding it would have left. The launch that makes new tokens pending comes last, since all others read what it writes;
the graph says so by giving it y.
"""

from __future__ import annotations

import math

import onnx

from nemo_build.engines.gpu.ops import KernelOps
from nemo_build.engines.trt.ops import Context, attributes_of
from nemo_build.engines.trt.phases import DECODE

OP = "SelectiveScan"

SCAN_CHUNK = 128
"""Prompt tokens in a chunk."""

_CHUNKED = ("chunk_decays", "chunk_states", "pass_states", "chunk_outputs")


def lower(k: KernelOps, c: Context, node: onnx.NodeProto) -> None:
    """State ``[B, H, P, N]`` and ring ``[B, K, H*P+G*N+H]``, float32, updated in place."""
    x, dt, b, cc, a_log, d_skip, dt_bias, state, ring, _, past, accepted, lengths = node.input
    y, state_out, ring_out = node.output
    heads, head_dim, width = (int(n) for n in c.shapes[state][1:])
    groups = (int(c.shapes[ring][2]) - heads * head_dim - heads) // width
    dims = {
        **{"heads": heads, "head_dim": head_dim, "width": width, "groups": groups},
        **{"pending": c.phase.pending, "chunk": SCAN_CHUNK},
    }
    limits = {"dt_min": 0.0, "dt_max": math.inf} | attributes_of(node)
    attributes = {n: v for n, v in limits.items() if v not in (0.0, math.inf)}
    values = {
        **{n: k.cast(c, v) for n, v in (("x", x), ("dt", dt), ("b", b), ("c", cc))},
        **{n: k.weights.float32(v) for n, v in (("a_log", a_log), ("d_skip", d_skip), ("dt_bias", dt_bias))},
        **{"state": state, "pending": ring, "slots": k.slots(c, lengths)},
        **{"past": past, "accepted": accepted, "lengths": lengths},
    }
    for launch in ("step",) if c.phase.name == DECODE else _CHUNKED:
        values |= k.launch(c, OP, [launch], attributes, dims, values, state_out=state_out)
    values["after"] = values["y"]
    k.launch(c, OP, ["keep"], attributes, dims, values, pending_out=ring_out)
    c.g.op("Identity", c.to_float(values["y"]), out=y)
