# SPDX-License-Identifier: Apache-2.0
"""``structure``: tensors, graphs and options are as they were recorded, but for what is allowed to change."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.structure import structure_of
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "structure"
NEEDS_BASELINE = True


@dataclass(frozen=True)
class Settings(Base):
    """What may change.

    Attributes:
        allow: Patterns of ``SECTION/NAME`` that may change, for example ``versions/*`` or ``tensors/mtp.*``. A pattern
            that matches nothing of the engine is a mistake, and is told.
        most_shown: Changes that are listed.
    """

    allow: tuple[str, ...] = ("versions/*",)
    most_shown: int = 20


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The structure."""
    return structure_of(subject)


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare name by name."""
    was = before or {}
    places = [(s, n) for s in sorted({*now, *was}) for n in sorted({*now.get(s, {}), *was.get(s, {})})]
    changed = [(s, n) for s, n in places if before and now.get(s, {}).get(n) != was.get(s, {}).get(n)]
    names = [f"{s}/{n}" for s, n in places]
    dead = [p for p in settings.allow if not fnmatch.filter(names, p)]
    allowed = [(s, n) for s, n in changed if any(fnmatch.fnmatchcase(f"{s}/{n}", p) for p in settings.allow)]
    forbidden = [c for c in changed if c not in allowed]
    figures = [
        Figure(
            f"{s}/{n}",
            Status.REGRESS,
            now.get(s, {}).get(n, "absent"),
            was.get(s, {}).get(n, "absent"),
            "as recorded",
        )
        for s, n in forbidden[: settings.most_shown]
    ]
    figures += [
        Figure(pattern, Status.BROKEN, "matches nothing", limit="patterns match something")
        for pattern in dead
    ]
    figures.append(
        Figure(
            "changes",
            Status.REGRESS if forbidden else Status.PASS,
            len(forbidden),
            0,
            "none but those allowed",
            f"{len(allowed)} allowed" if allowed else "",
        )
    )
    return Judgement(f"{len(forbidden)} of {len(places)} entries changed that must not", figures)
