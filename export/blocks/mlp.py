# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward block: up, relu², down."""

from __future__ import annotations

import onnx_ir as ir

from nemo_build.export.blocks import WEIGHT_DTYPES, StepInputs, projection
from nemo_build.export.graph import GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import BlockKind, ModelSpec
from nemo_build.state import StateSpec

KIND = BlockKind.MLP


def tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """What the checkpoint must hold below the layer's prefix."""
    assert spec.mlp is not None, "a spec with mlp layers has an mlp section"
    return feed_forward_tensors("mixer", spec.hidden_size, spec.mlp.intermediate_size, spec.mlp.bias, "mlp")


def states(spec: ModelSpec, prefix: str) -> tuple[StateSpec, ...]:
    """None."""
    return ()


def build(g: GraphBuilder, spec: ModelSpec, prefix: str, x: ir.Value, step: StepInputs) -> ir.Value:
    """Add the mixer."""
    assert spec.mlp is not None, "a spec with mlp layers has an mlp section"
    return feed_forward(g, f"{prefix}.mixer", x, step.lengths, bias=spec.mlp.bias)


def feed_forward_tensors(
    prefix: str, hidden: int, inner: int, bias: bool, role: str
) -> dict[str, TensorRule]:
    """Tensors of an up/down pair below `prefix`."""
    rules = {
        f"{prefix}.up_proj.weight": projection((inner, hidden), f"{role}.up_proj"),
        f"{prefix}.down_proj.weight": projection((hidden, inner), f"{role}.down_proj"),
    }
    if bias:
        rules[f"{prefix}.up_proj.bias"] = TensorRule((inner,), WEIGHT_DTYPES, f"{role}.up_proj")
        rules[f"{prefix}.down_proj.bias"] = TensorRule((hidden,), WEIGHT_DTYPES, f"{role}.down_proj")
    return rules


def feed_forward(g: GraphBuilder, prefix: str, x: ir.Value, lengths: ir.Value, *, bias: bool) -> ir.Value:
    """down(relu(up(x))²) with the checkpoint tensors below `prefix`."""
    return g.linear(
        g.relu2(g.linear(x, f"{prefix}.up_proj", lengths, bias=bias)),
        f"{prefix}.down_proj",
        lengths,
        bias=bias,
    )
