# SPDX-License-Identifier: Apache-2.0
"""The speculators by name, found by looking into ``speculators/``, and which of them an engine can have."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.runtime.speculation import speculators
from nemo_build.runtime.speculation.base import MOST_PENDING
from nemo_build.runtime.speculation.kind import SpeculatorKind

MOST_DRAFTS = MOST_PENDING - 1
"""Drafts of a sequence in a step at most; they and the token before them are pending after it."""

ADAPTIVE_DRAFTS = 7
"""The same where the length is chosen from step to step."""


def _find() -> dict[str, SpeculatorKind]:
    names = [m.name for m in pkgutil.iter_modules(speculators.__path__)]
    found = {n: importlib.import_module(f"{speculators.__name__}.{n}").KIND for n in names}
    return dict(sorted(found.items(), key=lambda item: item[1].rank))


SPECULATORS: Mapping[str, SpeculatorKind] = _find()
"""All speculators by name, the preferred one first."""


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
