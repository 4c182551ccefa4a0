# SPDX-License-Identifier: Apache-2.0
"""The target model's step graph: prefill, decode and verification in one."""

from __future__ import annotations

from nemo_build.export.blocks import WEIGHT_DTYPES, blocks, projection
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.export.models import head, layer, step_inputs
from nemo_build.spec import BlockKind, ModelSpec

NAME = "target"


def applies(spec: ModelSpec) -> bool:
    """Every model has one."""
    return True


def layers(spec: ModelSpec) -> dict[str, BlockKind]:
    """The trunk's layers."""
    return {f"backbone.layers.{i}": kind for i, kind in enumerate(spec.layers)}


def tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """The trunk's tensors."""
    table = (spec.vocab_size, spec.hidden_size)
    norm = TensorRule((spec.hidden_size,), WEIGHT_DTYPES, "norm")
    rules = {"backbone.embeddings.weight": TensorRule(table, WEIGHT_DTYPES, "embeddings")}
    for prefix, kind in layers(spec).items():
        rules[f"{prefix}.norm.weight"] = norm
        rules |= {f"{prefix}.{name}": rule for name, rule in blocks()[kind].tensors(spec).items()}
    rules["backbone.norm_f.weight"] = norm
    if not spec.tie_word_embeddings:
        rules["lm_head.weight"] = projection(table, "lm_head")
    return rules


def build(g: GraphBuilder, spec: ModelSpec) -> None:
    """Embedding, layers, final norm, head. ``hidden`` is the residual after the final norm."""
    step = step_inputs(g)
    rows = g.op("Gather", g.weight("backbone.embeddings.weight"), step.input_ids, axis=0, name="embeddings")
    x = g.op("Cast", rows, to=ACTIVATION, name="embedded")
    for prefix, kind in layers(spec).items():
        x = layer(g, spec, kind, prefix, x, step)
    head(
        g, spec, g.rms_norm(x, g.weight("backbone.norm_f.weight", ACTIVATION), spec.norm_eps, "norm_f"), step
    )
