# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention without positional encoding."""

from __future__ import annotations

import onnx_ir as ir

from nemo_build.export.blocks import StepInputs, projection
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import AttentionSpec, BlockKind, ModelSpec
from nemo_build.state import StateSpec

KIND = BlockKind.ATTENTION

CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale")
"""Scales of an FP8 key/value cache, where a checkpoint has them."""

E4M3_MAX = 448.0


def tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """What the checkpoint must hold below the layer's prefix."""
    a, hidden = _section(spec), spec.hidden_size
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    rules = {f"mixer.{n}.weight": projection(shape, f"attention.{n}") for n, shape in shapes.items()}
    for name in CACHE_SCALES:
        rules[f"mixer.{name}"] = TensorRule((), ("F32",), "attention.cache_scale", optional=True)
    return rules


def states(spec: ModelSpec, prefix: str) -> tuple[StateSpec, ...]:
    """Key and value cache."""
    a = _section(spec)
    shape = ("slots", a.num_kv_heads, "context", a.head_dim)
    return tuple(StateSpec(f"{kind}.{prefix}", kind, shape, "float32") for kind in ("key", "value"))


def build(g: GraphBuilder, spec: ModelSpec, prefix: str, x: ir.Value, step: StepInputs) -> ir.Value:
    """Add the mixer: three projections, attention over the cache, projection."""
    a, p = _section(spec), f"{prefix}.mixer"
    q, k, v = (g.linear(x, f"{p}.{n}_proj", step.lengths) for n in "qkv")
    k, v = (_rounded(g, f"{p}.{name}", value) for name, value in zip(CACHE_SCALES, (k, v), strict=True))
    caches = states(spec, prefix)
    y, *caches_out = g.call(
        "CachedAttention",
        [q, k, v, *(g.state(c) for c in caches), step.slots, step.past, step.lengths],
        name="attention",
        scale=a.scale,
    )
    for state, value in zip(caches, caches_out, strict=True):
        g.set_state(state, value)
    return g.linear(y, f"{p}.o_proj", step.lengths)


def _rounded(g: GraphBuilder, scale: str, x: ir.Value) -> ir.Value:
    """Round keys or values to FP8 where the checkpoint has a scale for it, as an FP8 cache would."""
    if not g.has(scale):
        return x
    factor = g.weight(scale)
    held = g.op(
        "Clip", g.op("Div", x, factor), g.constant(-E4M3_MAX), g.constant(E4M3_MAX), name="to_fp8_range"
    )
    codes = g.op("Cast", held, to=ir.DataType.FLOAT8E4M3FN, name="fp8")
    return g.op("Mul", g.op("Cast", codes, to=ACTIVATION, name="from_fp8"), factor, name="rounded")


def _section(spec: ModelSpec) -> AttentionSpec:
    assert spec.attention is not None, "a spec with attention layers has an attention section"
    return spec.attention
