# SPDX-License-Identifier: Apache-2.0
"""The graph that extends a drafter's context: the target's hidden states become keys and values in its caches.

It is run over every token that the target has taken, in chunks of any size. The keys and values of a token are the
same for a layer whatever is drafted later, so that they are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from nemo_build.export.blocks import projection
from nemo_build.export.drafters import (
    Rotation,
    key_value_tensors,
    keys_values,
    layers,
    name,
    norm,
    norm_rule,
    states,
)
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftSpec

SUFFIX = "_context"


def applies(draft: DraftSpec) -> bool:
    """Every drafter has one."""
    return True


def tensors(draft: DraftSpec) -> dict[str, TensorRule]:
    """What makes a context of taps, and keys and values of a context."""
    wide = (draft.hidden_size, len(draft.taps) * draft.hidden_size)
    rules = {
        "fc.weight": projection(wide, "draft.fc"),
        "hidden_norm.weight": norm_rule(draft.hidden_size),
    }
    for layer in layers(draft):
        rules |= key_value_tensors(draft, layer)
    return rules


def build(g: GraphBuilder, spec: ModelSpec, draft: DraftSpec, taps: Sequence[int]) -> None:
    """``hidden_norm(fc(taps))``, and its keys and values in every layer's cache."""
    given = g.input("taps", ("batch", "steps", len(taps) * draft.hidden_size), ACTIVATION)
    lengths, past, slots = (g.input(n, ("batch",)) for n in ("lengths", "past", "slots"))
    wide = _chosen(g, draft, given, taps)
    context = norm(g, draft, g.linear(wide, name(draft, "fc"), lengths), "hidden_norm")
    rotation = Rotation.of(g, draft, past, context)
    for layer in layers(draft):
        with g.scope(name(draft, layer)):
            k, v = keys_values(g, draft, layer, context, lengths, rotation)
            _write(g, draft, layer, k, v, (slots, past, lengths))


def _chosen(g: GraphBuilder, draft: DraftSpec, given: ir.Value, taps: Sequence[int]) -> ir.Value:
    """The drafter's own taps of those that the target gives, in the drafter's order."""
    if tuple(taps) == draft.taps:
        return given
    apart = g.op("Reshape", given, g.constant([0, 0, len(taps), draft.hidden_size]), name="taps_apart")
    chosen = g.op(
        "Gather", apart, g.constant([taps.index(t) for t in draft.taps]), axis=2, name="taps_chosen"
    )
    return g.op(
        "Reshape", chosen, g.constant([0, 0, len(draft.taps) * draft.hidden_size]), name="taps_joined"
    )


def _write(
    g: GraphBuilder,
    draft: DraftSpec,
    layer: str,
    k: ir.Value,
    v: ir.Value,
    rows: tuple[ir.Value, ir.Value, ir.Value],
) -> None:
    """Write keys and values into the layer's caches.

    It is attention whose result nobody wants: the queries (the keys, one a key head) see themselves alone, so that
    it costs next to nothing, and what is written where is as in the block's attention.
    """
    caches = states(draft, layer)
    _, *caches_out = g.call(
        "CachedAttention",
        [k, k, v, *(g.state(c) for c in caches), *rows],
        name="write",
        scale=draft.scale,
        window=1,
    )
    for state, value in zip(caches, caches_out, strict=True):
        g.set_state(state, value)
