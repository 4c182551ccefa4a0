# SPDX-License-Identifier: Apache-2.0
"""The graphs of a block drafter (DFlash, DSpark): one module a graph, found by looking in this folder.

A module defines

- ``SUFFIX``: what follows the drafter's kind in the graph's name, also its file's;
- ``applies(draft) -> bool``: whether the drafter has such a graph;
- ``tensors(draft) -> dict[str, TensorRule]``: what the graph needs of the drafter's checkpoint, by name;
- ``build(g, spec, draft, taps) -> None``: the graph; ``taps`` are the target's layers that its taps come from.

In the graphs, the drafter's tensors have its kind before their names (:func:`name`), because those of two drafters
and of the target may be equal.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import onnx_ir as ir

from nemo_build.export.blocks import WEIGHT_DTYPES, projection
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec_draft import DraftSpec
from nemo_build.state import StateSpec


@cache
def modules() -> tuple[ModuleType, ...]:
    """All graph modules."""
    return tuple(importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))


def drafter_graphs(draft: DraftSpec) -> Mapping[str, ModuleType]:
    """The modules of a drafter's graphs, by the graphs' names."""
    return {f"{draft.kind}{m.SUFFIX}": m for m in modules() if m.applies(draft)}


def drafter_tensors(draft: DraftSpec) -> dict[str, TensorRule]:
    """Every tensor that the drafter's checkpoint must hold, and nothing else may be in it."""
    return {n: rule for m in drafter_graphs(draft).values() for n, rule in m.tensors(draft).items()}


def name(draft: DraftSpec, tensor: str) -> str:
    """The name in the graphs of a tensor of the drafter's checkpoint."""
    return f"{draft.kind}.{tensor}"


def layers(draft: DraftSpec) -> list[str]:
    """The layers' tensors' prefixes in the checkpoint, in order."""
    return [f"layers.{i}" for i in range(len(draft.windows))]


def states(draft: DraftSpec, layer: str) -> tuple[StateSpec, ...]:
    """Key and value cache of a layer: of the context, one entry a token that the target has taken."""
    shape = ("slots", draft.num_kv_heads, "context", draft.head_dim)
    return tuple(
        StateSpec(f"{kind}.{name(draft, layer)}", kind, shape, "float32") for kind in ("key", "value")
    )


def norm_rule(width: int) -> TensorRule:
    """The rule of a norm's weight."""
    return TensorRule((width,), WEIGHT_DTYPES, "draft.norm")


def key_value_tensors(draft: DraftSpec, layer: str) -> dict[str, TensorRule]:
    """Those of a layer's tensors that make keys and values, which context and blocks share."""
    shape = (draft.num_kv_heads * draft.head_dim, draft.hidden_size)
    rules = {f"{layer}.self_attn.{n}_proj.weight": projection(shape, f"draft.{n}_proj") for n in "kv"}
    return {**rules, f"{layer}.self_attn.k_norm.weight": norm_rule(draft.head_dim)}


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines ``[B, L, D/2]`` of the new tokens' positions."""

    cos: ir.Value
    sin: ir.Value

    @classmethod
    def of(cls, g: GraphBuilder, draft: DraftSpec, past: ir.Value, tokens: ir.Value) -> Rotation:
        """Those of positions ``past [B]`` and on, for ``tokens [B, L, ...]``.

        Positions times frequencies, cosines and sines are float32 whatever the activations are: at a position of a
        million an angle in a narrower type would be noise.
        """
        with g.scope("rotary"):
            steps = g.op("Squeeze", g.op("Shape", tokens, start=1, end=2), g.constant([0]), name="steps")
            time = g.op("Range", g.constant(0), steps, g.constant(1), name="time")
            position = g.op("Add", g.op("Unsqueeze", past, g.constant([1])), time, name="position")
            numbers = g.op("Cast", position, to=ir.DataType.FLOAT, name="float")
            frequencies = g.constant([float(f) for f in draft.rotary.frequencies()])
            angles = g.op("Mul", g.op("Unsqueeze", numbers, g.constant([2])), frequencies, name="angles")
            factor = g.constant(float(draft.rotary.attention_factor))
            return cls(
                *(g.op("Mul", g.op(op, angles), factor, name=f"{op.lower()}s") for op in ("Cos", "Sin"))
            )

    def turn(self, g: GraphBuilder, x: ir.Value, heads: int, label: str) -> ir.Value:
        """``x [B, L, heads*D]`` with each head turned by its token's position."""
        return g.op("RotaryEmbedding", x, self.cos, self.sin, num_heads=heads, name=f"{label}_turned")


def head_norm(
    g: GraphBuilder, draft: DraftSpec, x: ir.Value, weight: str, heads: int, label: str
) -> ir.Value:
    """RMSNorm of each head of ``x [B, L, heads*D]``."""
    split = g.op("Reshape", x, g.constant([0, 0, heads, draft.head_dim]), name=f"{label}_heads")
    normed = norm(g, draft, split, weight, f"{label}_norm")
    return g.op("Reshape", normed, g.constant([0, 0, heads * draft.head_dim]), name=f"{label}_joined")


def norm(g: GraphBuilder, draft: DraftSpec, x: ir.Value, weight: str, label: str = "norm") -> ir.Value:
    """RMSNorm with a tensor of the drafter's checkpoint."""
    return g.rms_norm(x, g.weight(name(draft, f"{weight}.weight"), ACTIVATION), draft.norm_eps, label)


def keys_values(
    g: GraphBuilder, draft: DraftSpec, layer: str, x: ir.Value, lengths: ir.Value, rotation: Rotation
) -> tuple[ir.Value, ir.Value]:
    """A layer's keys, normed and turned, and values of ``x [B, L, H]``, each ``[B, L, Hkv*D]``."""
    attention = f"{layer}.self_attn"
    k, v = (g.linear(x, name(draft, f"{attention}.{n}_proj"), lengths) for n in "kv")
    k = head_norm(g, draft, k, f"{attention}.k_norm", draft.num_kv_heads, "k")
    return rotation.turn(g, k, draft.num_kv_heads, "k"), v
