# SPDX-License-Identifier: Apache-2.0
"""The target model's step graph: prefill, decode and verification in one."""

from __future__ import annotations

from nemo_build.export.blocks import WEIGHT_DTYPES, blocks, projection
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.export.models import GraphOptions, embed, head, layer, step_inputs
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


def build(g: GraphBuilder, spec: ModelSpec, options: GraphOptions) -> None:
    """Embedding, layers, final norm, head. ``hidden`` is the residual after the final norm, unless asked otherwise."""
    step = step_inputs(g)
    x = embed(g, step, "backbone.embeddings")
    residuals = []
    for prefix, kind in layers(spec).items():
        x = layer(g, spec, kind, prefix, x, step)
        residuals.append(x)
    normed = g.rms_norm(x, g.weight("backbone.norm_f.weight", ACTIVATION), spec.norm_eps, "norm_f")
    if options.taps:
        tapped = residuals if options.last_tap == "raw" else [*residuals[:-1], normed]
        taps = g.op("Concat", *(tapped[i] for i in options.taps), axis=-1, name="tapped")
        g.output(taps, "taps", ("batch", "steps", len(options.taps) * spec.hidden_size))
    head(g, spec, normed, step, hidden=x if options.mtp_hidden == "raw" else normed)
