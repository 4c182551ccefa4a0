# SPDX-License-Identifier: Apache-2.0
"""The speculators by name: what each needs of an engine, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_build.engines.backends import open_graph, open_session
from nemo_build.errors import RequestError
from nemo_build.runtime.speculation.base import MOST_PENDING, Speculator
from nemo_build.runtime.speculation.block import BlockSpeculator
from nemo_build.runtime.speculation.lookup import LookupSpeculator
from nemo_build.runtime.speculation.mtp import MtpSpeculator
from nemo_build.spec_draft import DraftSpec

MOST_DRAFTS = MOST_PENDING - 1
"""Drafts of a sequence in a step at most; they and the token before them are pending after it."""

ADAPTIVE_DRAFTS = 7
"""The same where the length is chosen from step to step."""


_SMALL = 64 << 20
"""Bytes of weights below which a drafter's part of them lies in a core's cache."""


@dataclass(frozen=True)
class EngineFiles:
    """An engine that is being opened: its directory, its manifest, and what all of its sessions are opened with."""

    directory: Path
    manifest: Mapping[str, Any]
    sizes: Mapping[str, Any]

    def in_turn(self, *, drafter: bool) -> EngineFiles:
        """The same for graphs that run in turn, which must not get into each other's way.

        The threads of a graph that is done go on looking for work for a while, on the cores that the next graph needs.
        Where weights have to be read from memory they are told to stop; a small drafter needs none but its own.

        Args:
            drafter: Whether it is for the drafter's graphs, and not for the target.
        """
        if self.manifest["plan"]["weights_file"] >= _SMALL:
            return replace(self, sizes={**self.sizes, "yields": True})
        return replace(self, sizes={**self.sizes, "threads": 1}) if drafter else self

    def session(self, graph: str, **options: Any) -> Any:
        """Open a step graph."""
        return open_session(self.directory, self.manifest, graph, **{**self.sizes, **options})

    def graph(self, graph: str, **options: Any) -> Any:
        """Open another graph."""
        return open_graph(self.directory, self.manifest, graph, **{**self.sizes, **options})


@dataclass(frozen=True)
class SpeculatorKind:
    """A speculator.

    Attributes:
        graphs: Graphs of the engine that it cannot do without.
        features: The target's output that it needs: ``hidden``, ``taps``, or ``None``.
        open: Makes it.
    """

    graphs: tuple[str, ...]
    features: str | None
    open: Callable[[EngineFiles], Speculator]


def _open_mtp(files: EngineFiles) -> Speculator:
    return MtpSpeculator(files.session("mtp", hidden=True))


def _open_lookup(files: EngineFiles) -> Speculator:
    return LookupSpeculator()


def _open_block(kind: str, files: EngineFiles) -> Speculator:
    spec = DraftSpec.from_json(files.manifest["drafters"][kind]["spec"])
    context = files.graph(f"{kind}_context")
    block = files.session(kind, state=context.state(), hidden=spec.confidence)
    outputs = ["logits", *["confidence"] * spec.confidence]
    markov = files.graph(f"{kind}_markov", outputs=outputs) if spec.markov_rank else None
    return BlockSpeculator(spec, context, block, markov)


SPECULATORS: Mapping[str, SpeculatorKind] = {
    "dspark": SpeculatorKind(("dspark_context", "dspark"), "taps", partial(_open_block, "dspark")),
    "dflash": SpeculatorKind(("dflash_context", "dflash"), "taps", partial(_open_block, "dflash")),
    "mtp": SpeculatorKind(("mtp",), "hidden", _open_mtp),
    "ngram": SpeculatorKind((), None, _open_lookup),
}
"""All speculators by name; ``auto`` is the first that an engine has the graphs for."""


def available_speculators(graphs: Collection[str]) -> list[str]:
    """Names of the speculators that an engine with these graphs can have, the preferred one first."""
    return [name for name, kind in SPECULATORS.items() if all(g in graphs for g in kind.graphs)]


def speculator_kind(name: str, draft_length: int | None, graphs: Mapping[str, Any]) -> SpeculatorKind | None:
    """The speculator of this name; the first there can be for ``auto``, None for ``none``.

    Raises:
        RequestError: There is none, the draft length makes no sense, or the engine lacks a graph it needs.
    """
    if draft_length is not None and not 1 <= draft_length <= MOST_DRAFTS:
        raise RequestError(f"The draft length is {draft_length}; it must be 1 to {MOST_DRAFTS}.")
    if name == "none":
        return None
    have = available_speculators(graphs)
    if name == "auto":
        name = have[0]
    if name not in SPECULATORS:
        raise RequestError(
            f"There is no speculator {name!r}; there are {', '.join(SPECULATORS)}, auto and none."
        )
    kind = SPECULATORS[name]
    missing = [g for g in kind.graphs if g not in graphs]
    if missing:
        raise RequestError(
            f"The engine cannot speculate with {name}: it has no graph {', '.join(missing)}.",
            hint=f"It can speculate with: {', '.join(have)}.",
        )
    return kind
