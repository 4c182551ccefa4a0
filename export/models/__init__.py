# SPDX-License-Identifier: Apache-2.0
"""The graphs of a model: one module a graph, found by looking in this folder.

A module defines

- ``NAME``: the graph's name, also its file's;
- ``applies(spec) -> bool``: whether the model has such a graph;
- ``layers(spec) -> dict[str, BlockKind]``: its layers by their tensors' prefix, in order;
- ``tensors(spec) -> dict[str, TensorRule]``: the checkpoint tensors that only this graph accounts for;
- ``build(g, spec) -> None``: the graph.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType

import onnx_ir as ir

from nemo_build.export.blocks import StepInputs, blocks
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import BlockKind, ModelSpec
from nemo_build.state import StateSpec


@cache
def models() -> Mapping[str, ModuleType]:
    """All graph modules by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.NAME: m for m in modules}


def expected_tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """Every tensor that a checkpoint of this model must hold, and nothing else may be in it."""
    return {
        name: rule for m in models().values() if m.applies(spec) for name, rule in m.tensors(spec).items()
    }


def model_states(spec: ModelSpec) -> dict[str, list[StateSpec]]:
    """The state buffers of every graph of a model."""
    return {
        name: [s for prefix, kind in m.layers(spec).items() for s in blocks()[kind].states(spec, prefix)]
        for name, m in models().items()
        if m.applies(spec)
    }


def step_inputs(g: GraphBuilder) -> StepInputs:
    """Declare the integer inputs that every step graph has."""
    rows = {name: g.input(name, ("batch",)) for name in ("lengths", "past", "accepted", "slots")}
    return StepInputs(
        input_ids=g.input("input_ids", ("batch", "steps")),
        logit_rows=g.input("logit_rows", ("rows",)),
        **rows,
    )


def layer(
    g: GraphBuilder, spec: ModelSpec, kind: BlockKind, prefix: str, x: ir.Value, step: StepInputs
) -> ir.Value:
    """``x + mixer(norm(x))``."""
    with g.scope(prefix):
        normed = g.rms_norm(x, g.weight(f"{prefix}.norm.weight", ACTIVATION), spec.norm_eps)
        mixed = blocks()[kind].build(g, spec, prefix, normed, step)
        return g.op("Add", x, mixed, name="residual")


def head(g: GraphBuilder, spec: ModelSpec, hidden: ir.Value, step: StepInputs) -> None:
    """Declare the outputs ``logits [R, V]`` at the rows asked for and ``hidden [B, L, H]``."""
    flat = g.op("Reshape", hidden, g.constant([-1, spec.hidden_size]), name="flatten")
    rows = g.op("Gather", flat, step.logit_rows, axis=0, name="logit_rows_taken")
    table = "backbone.embeddings" if spec.tie_word_embeddings else "lm_head"
    with g.scope("lm_head"):
        logits = g.linear(rows, table, None)
    g.output(logits, "logits", ("rows", spec.vocab_size))
    g.output(hidden, "hidden", ("batch", "steps", spec.hidden_size))
