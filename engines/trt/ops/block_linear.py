# SPDX-License-Identifier: Apache-2.0
"""``BlockLinear`` as a product with a constant in one of the forms."""

from __future__ import annotations

import onnx

from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.trt.phases import DECODE

OP = "BlockLinear"


def lower(c: Context, node: onnx.NodeProto) -> None:
    """``[B, L, K]`` or ``[R, K]`` to ``[.., N]``, float32 outside."""
    inputs = [*node.input, *[""] * (6 - len(node.input))]
    parts = [c.weights.tensors[name] for name in (inputs[1], inputs[3], inputs[4]) if name]
    many = c.phase.name != DECODE
    matrix = c.weights.matrix(inputs[1], [StoredProjection.of(parts)], stacked=False, multiplied=many)
    c.g.op("Identity", c.weights.multiply(c, inputs[0], matrix, inputs[5]), out=node.output[0])
