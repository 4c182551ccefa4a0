# SPDX-License-Identifier: Apache-2.0
"""``structure``: tensors, graphs and options are as they were recorded, but for what is allowed to change."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.structure import form_of, structure_of
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "structure"
MEASURED = ()
NEEDS_BASELINE = True
HARDWARE = False


@dataclass(frozen=True)
class Settings(Base):
    """What may change.

    Attributes:
        allow: Patterns of ``SECTION/NAME`` that may change, for example ``versions/*`` or ``tensors/mtp.*``. A pattern
            that matches nothing of the engine is a mistake, and is told.
        contents: Whether the contents of weights must be the same too, not only their format and shape: of a fine-tune
            they are not, of a rebuild they are.
        most_shown: Changes that are listed.
    """

    allow: tuple[str, ...] = ("versions/*",)
    contents: bool = True
    most_shown: int = 20


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The structure."""
    return structure_of(subject)


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Nothing is a number."""
    return {}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare name by name."""
    mine = _entries(now, settings)
    recorded = _entries(before or now, settings)
    names = sorted({*mine, *recorded})
    dead = [p for p in settings.allow if not fnmatch.filter(names, p)]
    changed = [n for n in names if mine.get(n) != recorded.get(n)]
    allowed = [n for n in changed if any(fnmatch.fnmatchcase(n, p) for p in settings.allow)]
    forbidden = [n for n in changed if n not in allowed]
    figures = [
        Figure(n, Status.REGRESS, mine.get(n, "absent"), recorded.get(n, "absent"), "as recorded")
        for n in forbidden[: settings.most_shown]
    ]
    figures += [Figure(p, Status.BROKEN, "matches nothing", limit="patterns match something") for p in dead]
    figures.append(
        Figure(
            "changes",
            Status.REGRESS if forbidden else Status.PASS,
            len(forbidden),
            0,
            "none but those allowed",
            f"allowed: {', '.join(allowed[: settings.most_shown])}" if allowed else "",
        )
    )
    return Judgement(f"{len(forbidden)} of {len(names)} entries changed that must not", figures)


def _entries(found: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Values by ``SECTION/NAME``; without digests of weights if their contents may change."""
    flat = {f"{section}/{name}": value for section, values in found.items() for name, value in values.items()}
    if settings.contents:
        return flat
    return {n: form_of(v) if n.startswith("tensors/") else v for n, v in flat.items()}
