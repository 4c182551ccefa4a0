# SPDX-License-Identifier: Apache-2.0
"""What a manifest says of a compiled graph, and the tensors that graphs have; ``docs/tensorrt_rtx.md`` has the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_build.engines.gpu.state import portable
from nemo_build.engines.trt.lowering import HIDDEN_ROWS, LOGITS_SUM, OVERFLOW, TOKENS
from nemo_build.engines.trt.phases import DECODE
from nemo_build.errors import RequestError
from nemo_build.state import StateSpec

TARGET = "target"
"""Name of the graph that everything else serves."""

_TOKENS, _ROW, _LINES = ("batch", "steps"), ("batch",), ("rows",)

INPUTS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "input_ids": (_TOKENS, np.int64),
    "hidden_in": ((*_TOKENS, "hidden"), np.float32),
    "taps": ((*_TOKENS, "taps"), np.float32),
    "lengths": (_ROW, np.int64),
    "past": (_ROW, np.int64),
    "accepted": (_ROW, np.int64),
    "logit_rows": (_LINES, np.int64),
    "previous_ids": (_LINES, np.int64),
    "base_logits": ((*_LINES, "vocabulary"), np.float32),
    "hidden": ((*_LINES, "hidden"), np.float32),
}
"""Inputs of graphs besides states and weights, by dimensions and element type."""

OUTPUTS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    OVERFLOW: (("one",), np.int64),
    "logits": ((*_LINES, "vocabulary"), np.float32),
    "confidence": (_LINES, np.float32),
    "hidden": ((*_TOKENS, "hidden"), np.float32),
    "taps": ((*_TOKENS, "taps"), np.float32),
    TOKENS: (_LINES, np.int64),
    LOGITS_SUM: (_LINES, np.float32),
    HIDDEN_ROWS: ((*_LINES, "hidden"), np.float32),
}
"""Outputs besides states."""


@dataclass(frozen=True)
class Contract:
    """One phase of a graph.

    Attributes:
        inputs: Names of its inputs besides states and weights.
        outputs: Names of its outputs besides states.
        states: Its state buffers, of a lowered graph.
        steps: Most new tokens of a row.
        logit_rows: Most rows of logits.
        pending: Tokens of a row that a step may leave uncommitted.
        cache_rows: Positions of a cache.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: tuple[StateSpec, ...]
    steps: int
    logit_rows: int
    pending: int
    cache_rows: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Contract:
        """What a manifest says of a graph."""
        states = tuple(StateSpec.from_json(s) for s in entry["state"])
        inner = {s.name for s in states} | {s.output for s in states}
        return cls(
            tuple(n for n in entry["inputs"] if n in INPUTS and n not in inner),
            tuple(n for n in entry["outputs"] if n not in inner),
            states,
            entry["steps"],
            entry["logit_rows"],
            entry["pending"],
            entry["cache_rows"],
        )

    def portable_states(self) -> list[StateSpec]:
        """The state buffers as the portable graph declares them, in the types that they have here."""
        return [portable(s, self.pending, self.cache_rows) for s in self.states]


def shapes_of(
    names: Iterable[str], table: Mapping[str, tuple[tuple[str, ...], Any]], sizes: Mapping[str, int]
) -> list[tuple[str, tuple[int, ...], Any]]:
    """Names, shapes and element types of some inputs or outputs for given sizes of their dimensions."""
    return [(n, tuple(sizes[d] for d in table[n][0]), table[n][1]) for n in names]


def widths(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that are an engine's own."""
    spec = manifest["spec"]
    hidden = int(spec["hidden_size"])
    taps = len(manifest["graph_options"].get("taps", ())) * hidden
    return {"one": 1, "vocabulary": int(spec["vocab_size"]), "hidden": hidden, "taps": taps}


def phase_entries(manifest: Mapping[str, Any], graph: str) -> dict[str, Mapping[str, Any]]:
    """What a manifest says of a graph, by phase; empty if there is no such graph."""
    return {g["phase"]: g for g in manifest["graphs"].values() if g["graph"] == graph}


def pending_of(manifest: Mapping[str, Any], least: int) -> int:
    """Tokens of a sequence that the target's graphs may leave uncommitted.

    Raises:
        RequestError: They are fewer than `least`.
    """
    pending = int(phase_entries(manifest, TARGET)[DECODE]["pending"])
    if pending < least:
        raise RequestError(
            f"The engine keeps {pending} tokens of a sequence pending, and a draft length of {least - 1} "
            f"takes {least}.",
            hint=f"Use a draft length of at most {pending - 1}.",
        )
    return pending


def portable_graphs(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The graphs of an engine by their names before they were lowered, each with its ``state`` as it was then."""
    return {
        entry["graph"]: {"state": [s.to_json() for s in Contract.of(entry).portable_states()]}
        for entry in manifest["graphs"].values()
        if entry["phase"] == DECODE
    }
