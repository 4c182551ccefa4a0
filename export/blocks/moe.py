# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts: sigmoid router with a correction bias, routed experts, one shared expert."""

from __future__ import annotations

import onnx_ir as ir

from nemo_build.export.blocks import WEIGHT_DTYPES, StepInputs, projection
from nemo_build.export.blocks.mlp import feed_forward, feed_forward_tensors
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import BlockKind, ModelSpec, MoeSpec
from nemo_build.state import StateSpec

KIND = BlockKind.MOE


def tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """What the checkpoint must hold below the layer's prefix."""
    m, hidden = _section(spec), spec.hidden_size
    width = m.latent_size or hidden
    rules = {
        "mixer.gate.weight": TensorRule((m.num_experts, hidden), WEIGHT_DTYPES, "moe.router"),
        "mixer.gate.e_score_correction_bias": TensorRule((m.num_experts,), WEIGHT_DTYPES, "moe.router_bias"),
    }
    for e in range(m.num_experts):
        rules |= feed_forward_tensors(f"mixer.experts.{e}", width, m.intermediate_size, False, "moe.expert")
    rules |= feed_forward_tensors(
        "mixer.shared_experts", hidden, m.shared_intermediate_size, m.bias, "moe.shared_expert"
    )
    if m.latent_size is not None:
        rules["mixer.fc1_latent_proj.weight"] = projection((width, hidden), "moe.latent")
        rules["mixer.fc2_latent_proj.weight"] = projection((hidden, width), "moe.latent")
        if m.bias:
            rules["mixer.fc1_latent_proj.bias"] = TensorRule((width,), WEIGHT_DTYPES, "moe.latent")
            rules["mixer.fc2_latent_proj.bias"] = TensorRule((hidden,), WEIGHT_DTYPES, "moe.latent")
    return rules


def states(spec: ModelSpec, prefix: str) -> tuple[StateSpec, ...]:
    """None."""
    return ()


def build(g: GraphBuilder, spec: ModelSpec, prefix: str, x: ir.Value, step: StepInputs) -> ir.Value:
    """Add the mixer: routed experts (in the latent space where there is one) plus the shared expert."""
    m, p = _section(spec), f"{prefix}.mixer"
    with g.scope("router"):
        indices, weights = _route(g, m, p, x)
    routed_in = x
    if m.latent_size is not None:
        routed_in = g.linear(x, f"{p}.fc1_latent_proj", step.lengths, bias=m.bias)
    routed = g.experts(routed_in, indices, weights, step.lengths, f"{p}.experts", m.num_experts)
    if m.latent_size is not None:
        routed = g.linear(routed, f"{p}.fc2_latent_proj", step.lengths, bias=m.bias)
    with g.scope("shared"):
        shared = feed_forward(g, f"{p}.shared_experts", x, step.lengths, bias=m.bias)
    return g.op("Add", routed, shared, name="sum")


def _route(g: GraphBuilder, m: MoeSpec, prefix: str, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Choose experts, in float32: ``(indices [B, L, k], weights [B, L, k])``.

    The bias only influences the choice; the weights are the unbiased sigmoid scores, normalised over the
    chosen ones and scaled (DeepSeek-V3, arXiv:2412.19437, equations 13 to 16).
    """
    kernel = g.op("Transpose", g.weight(f"{prefix}.gate.weight", ACTIVATION), perm=[1, 0], name="weight")
    scores = g.op("Sigmoid", g.op("MatMul", x, kernel, name="logits"), name="scores")
    bias = g.weight(f"{prefix}.gate.e_score_correction_bias", ACTIVATION)
    choice = g.op("Add", scores, bias, name="biased")
    if m.num_expert_groups > 1:
        choice = _mask_groups(g, m, choice)
    _, indices = g.ops("TopK", 2, choice, g.constant([m.top_k]), axis=-1, name="top_k")
    weights = g.op("GatherElements", scores, indices, axis=-1, name="chosen")
    if m.norm_topk_prob:
        # A ReduceSum over so few may add them in an order that depends on where in memory they lie, so that a token's
        # result would depend on its place in the batch. No score is negative, and if all are zero, so is the result.
        weights = g.op("LpNormalization", weights, axis=-1, p=1, name="normalised")
    return indices, g.op("Mul", weights, g.constant(float(m.scaling_factor)), name="weights")


def _mask_groups(g: GraphBuilder, m: MoeSpec, choice: ir.Value) -> ir.Value:
    """Leave only the experts of the best groups; a group is as good as its two best experts together."""
    per_group = m.num_experts // m.num_expert_groups
    grouped = g.op("Reshape", choice, g.constant([0, 0, m.num_expert_groups, per_group]), name="grouped")
    best, _ = g.ops("TopK", 2, grouped, g.constant([2]), axis=-1, name="best_two")
    group_scores = g.op("ReduceSum", best, g.constant([-1]), keepdims=0, name="group_scores")
    _, top = g.ops("TopK", 2, group_scores, g.constant([m.top_expert_groups]), axis=-1, name="top_groups")
    nothing = g.op("Expand", g.constant(0.0), g.op("Shape", group_scores), name="no_groups")
    ones = g.op("Expand", g.constant(1.0), g.op("Shape", top), name="ones")
    chosen = g.op("ScatterElements", nothing, top, ones, axis=-1, name="group_mask")
    mask = g.op("Unsqueeze", g.op("Cast", chosen, to=ir.DataType.BOOL), g.constant([-1]), name="mask")
    masked = g.op("Where", mask, grouped, g.constant(float("-inf")), name="masked")
    return g.op("Reshape", masked, g.constant([0, 0, m.num_experts]), name="ungrouped")


def _section(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None, "a spec with moe layers has a moe section"
    return spec.moe
