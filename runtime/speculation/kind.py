# SPDX-License-Identifier: Apache-2.0
"""What a speculator needs of an engine, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_build.engines.backends import open_graph, open_session
from nemo_build.runtime.speculation.base import Speculator

__all__ = ["EngineFiles", "SpeculatorKind"]

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
        rank: ``auto`` takes the one of the lowest rank that an engine has the graphs for.
        graphs: Graphs of the engine that it cannot do without.
        features: The target's output that it needs: ``hidden``, ``taps``, or ``None``.
        open: Makes it.
    """

    rank: int
    graphs: tuple[str, ...]
    features: str | None
    open: Callable[[EngineFiles], Speculator]
