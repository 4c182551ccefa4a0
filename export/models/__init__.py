# SPDX-License-Identifier: Apache-2.0
"""The graphs of a model: one module a graph, found by looking in this folder.

A module defines

- ``NAME``: the graph's name, also its file's;
- ``applies(spec) -> bool``: whether the model has such a graph;
- ``layers(spec) -> dict[str, BlockKind]``: its layers by their tensors' prefix, in order;
- ``tensors(spec) -> dict[str, TensorRule]``: the checkpoint tensors that only this graph accounts for;
- ``build(g, spec, options) -> None``: the graph.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import onnx_ir as ir

from nemo_build.export.blocks import StepInputs, blocks
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import BlockKind, ModelSpec
from nemo_build.state import StateSpec


@dataclass(frozen=True)
class GraphOptions:
    """What a configuration does not say about the graphs, or what depends on the drafters.

    Attributes:
        taps: Layers of the target whose outputs are concatenated to its output ``taps``; no output if empty.
        last_tap: Whether a tap of the last layer is the residual ``raw`` or ``normed`` by the final norm.
        mtp_hidden: Whether the hidden states that the MTP module is fed, the target's and its own, are ``normed`` or
            ``raw``: after or before the final norm.
        mtp_norm: Whether the module's final norm is an ``rms`` norm or a ``layer`` norm without bias.
    """

    taps: tuple[int, ...] = ()
    last_tap: Literal["raw", "normed"] = "raw"
    mtp_hidden: Literal["normed", "raw"] = "normed"
    mtp_norm: Literal["rms", "layer"] = "rms"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "taps": list(self.taps)}


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


def embed(g: GraphBuilder, step: StepInputs, table: str) -> ir.Value:
    """The tokens' rows of an embedding table, ``[B, L, H]``."""
    rows = g.op("Gather", g.weight(f"{table}.weight"), step.input_ids, axis=0, name="embeddings")
    return g.op("Cast", rows, to=ACTIVATION, name="embedded")


def head_table(spec: ModelSpec) -> str:
    """The projection that is the target's output head."""
    return "backbone.embeddings" if spec.tie_word_embeddings else "lm_head"


def head(
    g: GraphBuilder,
    spec: ModelSpec,
    normed: ir.Value,
    step: StepInputs,
    *,
    hidden: ir.Value | None = None,
    table: str | None = None,
) -> None:
    """Declare the outputs ``logits [R, V]`` at the rows asked for and ``hidden [B, L, H]``.

    Args:
        g: The graph.
        spec: The target.
        normed: What the head takes, ``[B, L, H]``.
        step: The step's inputs.
        hidden: The output `hidden`; `normed` if None.
        table: The head's projection; the target's own if None.
    """
    flat = g.op("Reshape", normed, g.constant([-1, spec.hidden_size]), name="flatten")
    rows = g.op("Gather", flat, step.logit_rows, axis=0, name="logit_rows_taken")
    with g.scope("lm_head"):
        logits = g.linear(rows, table or head_table(spec), None)
    g.output(logits, "logits", ("rows", spec.vocab_size))
    hidden = normed if hidden is None else hidden
    g.output(hidden, "hidden", ("batch", "steps", spec.hidden_size))
