# SPDX-License-Identifier: Apache-2.0
"""``CausalConv1d`` as one kernel node; its state, like its inputs, is of the type of activations.

The kernel computes a token from its own taps in one order, whatever else is in the step.
"""

from __future__ import annotations

import onnx

from nemo_build.engines.gpu.ops import KernelOps
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.trt.phases import DECODE

OP = "CausalConv1d"


def lower(k: KernelOps, c: Context, node: onnx.NodeProto) -> None:
    """State ``[B, W-1+K, C]``, updated in place."""
    x, weight, bias, state, _, past, accepted, lengths = node.input
    y, state_out = node.output
    channels, _, taps = (int(n) for n in c.shapes[weight])
    values = {
        "x": k.cast(c, x),
        "weight": k.weights.float32(weight),
        "bias": k.weights.float32(bias) if bias else "",
        "state": state,
        "slots": k.slots(c, lengths),
        "past": past,
        "accepted": accepted,
        "lengths": lengths,
    }
    dims = {"channels": channels, "width": taps, "pending": c.phase.pending, "bias": int(bool(bias))}
    launch = "step" if c.phase.name == DECODE else "prompt"
    made = k.launch(c, OP, [launch], {}, dims, values, state_out=state_out)
    c.g.op("Identity", c.to_float(made["y"]), out=y)
