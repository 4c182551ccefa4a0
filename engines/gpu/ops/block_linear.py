# SPDX-License-Identifier: Apache-2.0
"""``BlockLinear``: kernel nodes that read stored codes, and the library's product for plain weights.

Of the kernels, ``tile_16`` is the way for decoding: each weight is read once for up to 16 tokens, any number of tokens
may come, and what a token gives is the same sum in the same order wherever it stands and whatever stands beside it.
``tile_128`` is the way for prompts. Where the checkpoint says so, a node before it rounds the inputs to codes.

A plain weight has the library's own product, in the type of activations, written as Gemm so that no backend makes a
transposed copy of an input. Whether a token's result there depends on how many tokens there are is up to the library.
"""

from __future__ import annotations

import onnx

from nemo_build.engines.gpu.ops import KernelOps
from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.ops import Context, attributes_of
from nemo_build.engines.trt.phases import DECODE

OP = "BlockLinear"


def lower(k: KernelOps, c: Context, node: onnx.NodeProto) -> None:
    """``[..., K]`` to ``[..., N]``, float32 outside."""
    inputs = [*node.input, *[""] * (6 - len(node.input))]
    x, weight, lengths, scale, scale_2, input_scale = inputs
    projection = StoredProjection.of([c.weights.tensors[n] for n in (weight, scale, scale_2) if n])
    stored = k.weights.stored(weight, [projection], stacked=False)
    if projection.stored_format == "plain":
        flat = c.g.reshape(k.cast(c, x), -1, projection.columns)
        _unflatten(c, c.g.op("Gemm", flat, stored["weight"], transB=1), x, projection.rows, node.output[0])
        return
    attributes = {"weight_format": projection.stored_format}
    dims = {"rows": projection.rows, "columns": projection.columns, "lengths": int(bool(lengths))}
    tokens = k.cast(c, x)
    if not lengths:  # of any rank; kernels take rows of tokens
        tokens = c.g.reshape(tokens, 1, -1, projection.columns)
    values = {"x": tokens, "lengths": lengths, **stored}
    if input_scale and k.weights.keeps_rounding:
        attributes["activation_format"] = str(attributes_of(node)["activation_format"])
        values["input_scale"] = k.weights.numbers(f"{input_scale}.vector", [c.weights.tensors[input_scale]])
        rounded = k.launch(c, OP, ["round"], attributes, dims, values)
        values |= {"x": rounded["codes"], "x_scale": rounded.get("scales", "")}
    size = 16 if c.phase.name == DECODE else 128
    kinds = ("codes", "tile") if "activation_format" in attributes else ("tile",)
    y = k.launch(c, OP, [f"{kind}_{size}" for kind in kinds], attributes, dims, values)["y"]
    if lengths:
        c.g.op("Identity", c.to_float(y), out=node.output[0])
    else:
        _unflatten(c, y, x, projection.rows, node.output[0])


def _unflatten(c: Context, y: str, x: str, rows: int, out: str) -> None:
    """`y` in float32 with the leading dimensions of `x`, ``[..., rows]``."""
    shape = c.g.op("Concat", c.g.op("Shape", x, start=0, end=-1), c.g.ints(rows), axis=0)
    c.g.op("Reshape", c.to_float(y), shape, out=out)
