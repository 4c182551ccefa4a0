# SPDX-License-Identifier: Apache-2.0
"""``CachedAttention`` as the standard ops of :mod:`nemo_build.engines.trt.ops.cached_attention`.

New keys and values of padding are made zero first. Kernels do not write what they compute for no token, and attention
multiplies what a mask hides by zero, so whatever lies there must be a number.
"""

from __future__ import annotations

import onnx

from nemo_build.engines.gpu.ops import KernelOps
from nemo_build.engines.trt.ops import Context
from nemo_build.engines.trt.ops import cached_attention as standard

OP = "CachedAttention"


def lower(k: KernelOps, c: Context, node: onnx.NodeProto) -> None:
    """Caches ``[B, Hkv, M, D]``, in the type of activations."""
    masked = onnx.NodeProto()
    masked.CopyFrom(node)
    valid = c.is_valid(node.input[7], node.input[0])
    for i in (1, 2):
        masked.input[i] = c.g.op("Where", valid, node.input[i], c.g.number(0))
    standard.lower(c, masked)
