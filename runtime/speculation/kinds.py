# SPDX-License-Identifier: Apache-2.0
"""The speculators by name: what each needs of an engine, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from nemo_build.errors import RequestError
from nemo_build.runtime.speculation.base import Speculator
from nemo_build.runtime.speculation.lookup import LookupSpeculator
from nemo_build.runtime.speculation.mtp import MtpSpeculator

MOST_DRAFTS = 15
"""Drafts of a sequence in a step at most; the pending ring is sized by it."""

ADAPTIVE_DRAFTS = 7
"""The same where the length is chosen from step to step."""


@dataclass(frozen=True)
class SpeculatorKind:
    """A speculator.

    Attributes:
        graphs: Graphs of the engine that it runs.
        needs_hidden: Whether the target has to return hidden states.
        open: Makes it from open sessions of those graphs.
    """

    graphs: tuple[str, ...]
    needs_hidden: bool
    open: Callable[..., Speculator]


SPECULATORS: Mapping[str, SpeculatorKind] = {
    "mtp": SpeculatorKind(("mtp",), True, MtpSpeculator),
    "ngram": SpeculatorKind((), False, LookupSpeculator),
}
"""All speculators by name."""


def speculator_kind(name: str, draft_length: int | None, graphs: Collection[str]) -> SpeculatorKind | None:
    """The speculator of this name; None for ``none``.

    Raises:
        RequestError: There is none, the draft length makes no sense, or the engine lacks a graph it needs.
    """
    if name == "none":
        return None
    if name not in SPECULATORS:
        raise RequestError(f"There is no speculator {name!r}; there are {', '.join(SPECULATORS)} and none.")
    if draft_length is not None and not 1 <= draft_length <= MOST_DRAFTS:
        raise RequestError(f"The draft length is {draft_length}; it must be 1 to {MOST_DRAFTS}.")
    kind = SPECULATORS[name]
    missing = [g for g in kind.graphs if g not in graphs]
    if missing:
        have = [n for n, k in SPECULATORS.items() if all(g in graphs for g in k.graphs)]
        raise RequestError(
            f"The engine cannot speculate with {name}: it has no graph {', '.join(missing)}.",
            hint=f"It can speculate with: {', '.join(have) or 'nothing'}.",
        )
    return kind
