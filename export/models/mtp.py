# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction module's step graph.

One module, applied again and again: it takes the token after position p and the hidden state of position p
(the target's, after its final norm, or the module's own of the depth before) and predicts the token after
that. Embeddings and head are the target's.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from nemo_build.errors import ConfigError
from nemo_build.export.blocks import WEIGHT_DTYPES, blocks, projection
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.export.models import GraphOptions, embed, head, layer, step_inputs
from nemo_build.spec import BlockKind, ModelSpec, MtpSpec

NAME = "mtp"


def applies(spec: ModelSpec) -> bool:
    """Whether the model has an MTP module."""
    return spec.mtp is not None


def layers(spec: ModelSpec) -> dict[str, BlockKind]:
    """The module's layers."""
    return {f"mtp.layers.{i}": kind for i, kind in enumerate(_section(spec).layers)}


def tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """The module's tensors, all below ``mtp.``."""
    mtp, hidden = _section(spec), spec.hidden_size
    norm = TensorRule((hidden,), WEIGHT_DTYPES, "mtp.norm")
    last = len(mtp.layers) - 1
    rules = {
        "mtp.layers.0.enorm.weight": norm,
        "mtp.layers.0.hnorm.weight": norm,
        "mtp.layers.0.eh_proj.weight": projection((hidden, 2 * hidden), "mtp.eh_proj"),
        f"mtp.layers.{last}.final_layernorm.weight": norm,
    }
    for prefix, kind in layers(spec).items():
        rules[f"{prefix}.norm.weight"] = norm
        for name, rule in blocks()[kind].tensors(spec).items():
            rules[f"{prefix}.{name}"] = replace(rule, role=f"mtp.{rule.role}")
    return rules


def build(g: GraphBuilder, spec: ModelSpec, options: GraphOptions) -> None:
    """Two norms, ``eh_proj`` over [embedding | hidden], the layers, the final norm, the target's head."""
    mtp = _section(spec)
    step = step_inputs(g)
    hidden = g.input("hidden_in", ("batch", "steps", spec.hidden_size), ACTIVATION)
    embedded = embed(g, step, "backbone.embeddings")

    def norm(x: ir.Value, name: str) -> ir.Value:
        return g.rms_norm(x, g.weight(f"mtp.layers.0.{name}.weight", ACTIVATION), spec.norm_eps, name)

    pair = g.op("Concat", norm(embedded, "enorm"), norm(hidden, "hnorm"), axis=-1, name="pair")
    x = g.linear(pair, "mtp.layers.0.eh_proj", step.lengths)
    for prefix, kind in layers(spec).items():
        x = layer(g, spec, kind, prefix, x, step)
    weight = g.weight(f"mtp.layers.{len(mtp.layers) - 1}.final_layernorm.weight", ACTIVATION)
    kind_of_norm = g.rms_norm if options.mtp_norm == "rms" else g.layer_norm
    normed = kind_of_norm(x, weight, spec.norm_eps, "final_layernorm")
    head(g, spec, normed, step, hidden=x if options.mtp_hidden == "raw" else normed)


def _section(spec: ModelSpec) -> MtpSpec:
    assert spec.mtp is not None, "a spec with an MTP graph has an MTP section"
    if spec.mtp.num_modules != 1:
        raise ConfigError(
            "The MTP part of this model cannot be honoured.",
            [f"num_nextn_predict_layers is {spec.mtp.num_modules}; known checkpoints store one module"],
        )
    return spec.mtp
