# SPDX-License-Identifier: Apache-2.0
"""A drafter's block: the newest token and masks behind it, over the context, in one pass.

It has the form of a step graph. A block's keys and values are written behind the context, and the next extension of
the context or the next block overwrites them: ``past`` has not moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from nemo_build.export.blocks import WEIGHT_DTYPES, StepInputs, projection
from nemo_build.export.drafters import (
    Rotation,
    head_norm,
    key_value_tensors,
    keys_values,
    layers,
    name,
    norm,
    norm_rule,
    states,
)
from nemo_build.export.graph import GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.export.models import embed, head, head_table, step_inputs
from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftSpec

SUFFIX = ""

EMBEDDINGS, HEAD = "embed_tokens", "lm_head"


def applies(draft: DraftSpec) -> bool:
    """Every drafter has one."""
    return True


def tensors(draft: DraftSpec) -> dict[str, TensorRule]:
    """The layers, the last norm, and embeddings and head where they are the drafter's own."""
    table = (draft.vocab_size, draft.hidden_size)
    rules = {}
    if draft.own_embeddings:
        rules[f"{EMBEDDINGS}.weight"] = TensorRule(table, WEIGHT_DTYPES, "draft.embeddings")
    for layer in layers(draft):
        rules |= _layer_tensors(draft, layer)
    rules["norm.weight"] = norm_rule(draft.hidden_size)
    if draft.own_head:
        rules[f"{HEAD}.weight"] = projection(table, "draft.lm_head")
    return rules


def _layer_tensors(draft: DraftSpec, layer: str) -> dict[str, TensorRule]:
    hidden, inner, q = draft.hidden_size, draft.intermediate_size, draft.num_heads * draft.head_dim
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    rules = key_value_tensors(draft, layer)
    for tensor, shape in shapes.items():
        rules[f"{layer}.{tensor}.weight"] = projection(shape, f"draft.{tensor.rsplit('.', 1)[1]}")
    for tensor in ("input_layernorm", "post_attention_layernorm"):
        rules[f"{layer}.{tensor}.weight"] = norm_rule(hidden)
    rules[f"{layer}.self_attn.q_norm.weight"] = norm_rule(draft.head_dim)
    if draft.sinks:
        sinks = TensorRule((draft.num_heads,), WEIGHT_DTYPES, "draft.sinks")
        rules[f"{layer}.self_attn.attention_sink_bias"] = sinks
    return rules


def build(g: GraphBuilder, spec: ModelSpec, draft: DraftSpec, taps: Sequence[int]) -> None:
    """Embedding, layers, final norm, head."""
    step = step_inputs(g)
    x = embed(g, step, name(draft, EMBEDDINGS) if draft.own_embeddings else "backbone.embeddings")
    rotation = Rotation.of(g, draft, step.past, step.input_ids)
    for layer, window in zip(layers(draft), draft.windows, strict=True):
        with g.scope(name(draft, layer)):
            normed = norm(g, draft, x, f"{layer}.input_layernorm", "input_norm")
            attended = _attention(g, draft, layer, normed, step, rotation, window)
            x = g.op("Add", x, attended, name="residual")
            normed = norm(g, draft, x, f"{layer}.post_attention_layernorm", "mlp_norm")
            x = g.op("Add", x, _gated(g, draft, layer, normed, step.lengths), name="residual")
    table = name(draft, HEAD) if draft.own_head else head_table(spec)
    head(g, spec, norm(g, draft, x, "norm"), step, table=table)


def _attention(
    g: GraphBuilder,
    draft: DraftSpec,
    layer: str,
    x: ir.Value,
    step: StepInputs,
    rotation: Rotation,
    window: int,
) -> ir.Value:
    """Queries and keys normed by head and turned, attention over context and block, projection."""
    attention = f"{layer}.self_attn"
    q = g.linear(x, name(draft, f"{attention}.q_proj"), step.lengths)
    q = rotation.turn(
        g, head_norm(g, draft, q, f"{attention}.q_norm", draft.num_heads, "q"), draft.num_heads, "q"
    )
    k, v = keys_values(g, draft, layer, x, step.lengths, rotation)
    caches = states(draft, layer)
    sinks = [g.weight(name(draft, f"{attention}.attention_sink_bias"))] if draft.sinks else []
    y, *caches_out = g.call(
        "CachedAttention",
        [q, k, v, *(g.state(c) for c in caches), step.slots, step.past, step.lengths, *sinks],
        name="attention",
        scale=draft.scale,
        window=window,
        causal=int(draft.causal),
    )
    for state, value in zip(caches, caches_out, strict=True):
        g.set_state(state, value)
    return g.linear(y, name(draft, f"{attention}.o_proj"), step.lengths)


def _gated(g: GraphBuilder, draft: DraftSpec, layer: str, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """down(silu(gate(x)) * up(x))."""
    gate, up = (g.linear(x, name(draft, f"{layer}.mlp.{n}_proj"), lengths) for n in ("gate", "up"))
    opened = g.op("Mul", gate, g.op("Sigmoid", gate), name="silu")
    inner = g.op("Mul", opened, up, name="gated")
    return g.linear(inner, name(draft, f"{layer}.mlp.down_proj"), lengths)
