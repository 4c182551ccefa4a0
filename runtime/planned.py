# SPDX-License-Identifier: Apache-2.0
"""Rows whose drafts are planned as counts: what they are, and which tokens are chosen, comes back with the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemo_build.runtime.speculation.rounds import NO_DRAFTS, Drafts
from nemo_build.runtime.steps import Computed, Row

PLANNED = -1
"""Stands for a draft that is still to be made."""


@dataclass(frozen=True)
class Chosen(Computed):
    """Rows whose tokens were chosen as well.

    Attributes:
        tokens: Those that follow each row's last one.
        accepted: How many of the first of these were drafts.
    """

    tokens: Sequence[Sequence[int]]
    accepted: Sequence[int]


def plan_drafts(lengths: Sequence[int]) -> list[Drafts]:
    """So many drafts for each row, that are still to be made."""
    return [Drafts([PLANNED] * n) if n else NO_DRAFTS for n in lengths]


def are_planned(drafts: Drafts) -> bool:
    """Whether drafts are still to be made."""
    return PLANNED in drafts.tokens[:1]


def with_drafts(row: Row, drafts: list[int]) -> Row:
    """A row with the drafts that were made in place of the planned ones."""
    own = row.tokens[: len(row.tokens) - len(row.drafts.tokens)]
    return replace(
        row,
        tokens=[*own, *drafts],
        wanted=row.wanted and 1 + len(drafts),
        drafts=Drafts(drafts) if drafts else NO_DRAFTS,
    )
