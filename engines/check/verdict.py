# SPDX-License-Identifier: Apache-2.0
"""What checks come to: four outcomes that are never taken for each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from nemo_build.engines.check.plain import plain

FORMAT = 1
"""Version of :meth:`Verdict.to_json`."""


class Status(StrEnum):
    """The outcome of a figure, of a check, or of all of them."""

    PASS = "pass"
    """It was checked, and is as it should be."""
    REGRESS = "regress"
    """It was checked, and got worse."""
    BROKEN = "broken"
    """The engine, the baseline or the check itself fails, so nothing can be said of it but that."""
    SKIPPED = "skipped"
    """It was not checked."""


EXIT_CODES: Mapping[Status, int] = {Status.PASS: 0, Status.REGRESS: 1, Status.BROKEN: 2, Status.SKIPPED: 3}
"""Exit status of ``nemo-build check`` by the outcome of all checks together."""

_WORST_FIRST = (Status.BROKEN, Status.REGRESS, Status.SKIPPED, Status.PASS)


def worst(statuses: Iterable[Status]) -> Status:
    """The outcome of several together: something skipped is no pass. Of none, nothing was checked."""
    found = set(statuses)
    return next((s for s in _WORST_FIRST if s in found), Status.SKIPPED)


@dataclass(frozen=True)
class Figure:
    """Something that was measured and judged.

    Attributes:
        name: What it is, within its check.
        status: Its outcome.
        value: What was found; a number where it is one.
        baseline: What was recorded; ``None`` if nothing was, or nothing is compared.
        limit: What the value may be at worst, in words.
        note: What a reader should know beside that: where, by how much, how sure.
    """

    name: str
    status: Status
    value: Any
    baseline: Any = None
    limit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Waiver:
    """Somebody's word that a regression may stay for a while.

    Attributes:
        name: ``CHECK`` or ``CHECK.FIGURE``.
        expires: The last day on which it counts, ``YYYY-MM-DD``.
        why: The reason.
    """

    name: str
    expires: str
    why: str


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        check: Its name in the suite.
        kind: Which kind of check it is.
        status: The outcome; a waived regression passes.
        headline: One sentence on it.
        figures: What was judged.
        causes: What it is likely to come from, the likeliest first.
        details: Data for plots, as plain data.
        seconds: What it took.
        waived: The waivers that made it pass.
    """

    check: str
    kind: str
    status: Status
    headline: str
    figures: list[Figure] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    waived: list[Waiver] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a suite.

    Attributes:
        status: Of all checks together.
        results: Of each, in the suite's order.
        allowed: Checks that may be skipped, by the suite's own word.
        facts: What was checked, against what, with what, where: plain data.
    """

    status: Status
    results: list[Result]
    allowed: list[str]
    facts: dict[str, Any]

    @classmethod
    def of(cls, results: list[Result], allowed: Iterable[str], facts: dict[str, Any]) -> Verdict:
        """The outcome of results. A skipped check that may be skipped says nothing, unless there is no other."""
        may_skip = sorted(allowed)
        counted = [r.status for r in results if r.status is not Status.SKIPPED or r.check not in may_skip]
        return cls(worst(counted), results, may_skip, facts)

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``report.schema.json`` says."""
        found: dict[str, Any] = plain({"format": FORMAT, "exit_code": self.exit_code, **asdict(self)})
        return found
