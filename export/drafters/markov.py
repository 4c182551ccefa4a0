# SPDX-License-Identifier: Apache-2.0
"""A drafter's Markov head: what the token before adds to the logits of a drafted one.

It is sequential where the block is not: the tokens of a block are chosen one after the other, each with this graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from nemo_build.export.blocks import WEIGHT_DTYPES, projection
from nemo_build.export.drafters import name
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftSpec

SUFFIX = "_markov"

_IN, _OUT, _CONFIDENCE = "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"


def applies(draft: DraftSpec) -> bool:
    """Whether the drafter has the head."""
    return draft.markov_rank > 0


def tensors(draft: DraftSpec) -> dict[str, TensorRule]:
    """A table of tokens' vectors, a projection to logits, and the confidence head where there is one."""
    table = (draft.vocab_size, draft.markov_rank)
    rules = {
        f"{_IN}.weight": TensorRule(table, WEIGHT_DTYPES, "draft.markov"),
        f"{_OUT}.weight": projection(table, "draft.markov"),
    }
    if draft.confidence:
        width = draft.hidden_size + draft.markov_rank
        rules[f"{_CONFIDENCE}.weight"] = TensorRule((1, width), WEIGHT_DTYPES, "draft.confidence")
        rules[f"{_CONFIDENCE}.bias"] = TensorRule((1,), WEIGHT_DTYPES, "draft.confidence")
    return rules


def build(g: GraphBuilder, spec: ModelSpec, draft: DraftSpec, taps: Sequence[int]) -> None:
    """``base_logits + w2(w1[previous_ids])``; confidence is ``sigmoid(proj([hidden | w1[previous_ids]]))``."""
    previous = g.input("previous_ids", ("rows",))
    base = g.input("base_logits", ("rows", draft.vocab_size), ACTIVATION)
    rows = g.op("Gather", g.weight(name(draft, f"{_IN}.weight")), previous, axis=0, name="vectors")
    vectors = g.op("Cast", rows, to=ACTIVATION, name="previous")
    added = g.linear(vectors, name(draft, _OUT), None)
    g.output(g.op("Add", base, added, name="sum"), "logits", ("rows", draft.vocab_size))
    if draft.confidence:
        _confidence(g, draft, vectors)


def _confidence(g: GraphBuilder, draft: DraftSpec, vectors: ir.Value) -> None:
    """Input ``hidden [rows, H]``, of the tokens whose logits these are; output ``confidence [rows]``."""
    hidden = g.input("hidden", ("rows", draft.hidden_size), ACTIVATION)
    features = g.op("Concat", hidden, vectors, axis=-1, name="features")
    weight = g.weight(name(draft, f"{_CONFIDENCE}.weight"), ACTIVATION)
    kernel = g.op("Transpose", weight, perm=[1, 0], name="confidence_weight")
    bias = g.weight(name(draft, f"{_CONFIDENCE}.bias"), ACTIVATION)
    score = g.op("Add", g.op("MatMul", features, kernel, name="confidence_product"), bias, name="score")
    flat = g.op("Squeeze", score, g.constant([1]), name="scores")
    g.output(g.op("Sigmoid", flat, name="accepted"), "confidence", ("rows",))
