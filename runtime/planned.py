# SPDX-License-Identifier: Apache-2.0
"""Rows whose drafts are planned as counts: what they are, and which tokens are chosen, comes back with the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_build.engines.session import StepOutput
from nemo_build.runtime.sampling import NonFiniteLogitsError
from nemo_build.runtime.speculation.rounds import NO_DRAFTS, Drafts
from nemo_build.runtime.steps import Computed, Row

PLANNED = -1
"""Stands for a draft that is still to be made."""


@dataclass(frozen=True)
class Chosen(Computed):
    """Rows whose tokens were chosen as well.

    Attributes:
        tokens: Those that follow each row's last one; ``None`` where its logits are unusable.
        accepted: How many of the first of these were drafts.
    """

    tokens: Sequence[Sequence[int] | None]
    accepted: Sequence[int]

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        drafts: Sequence[list[int]],
        tokens: Sequence[Sequence[int] | None],
        accepted: Sequence[int],
        seconds: float,
    ) -> Chosen:
        """What came back for rows with planned drafts: the drafts that were made, and what was chosen."""
        made = [_with_drafts(row, d) for row, d in zip(rows, drafts, strict=True)]
        return cls(made, StepOutput(np.empty((0, 0), np.float32)), seconds, tokens, accepted)

    def take(self) -> Iterator[tuple[int, None]]:
        """Let each request take its tokens: how many drafts were accepted. There are no features on the host."""
        for row, tokens, accepted in zip(self.rows, self.tokens, self.accepted, strict=True):
            if tokens is None:
                row.request.error = NonFiniteLogitsError(
                    "the engine's logits are unusable: they are not all finite"
                )
                yield 0, None
            else:
                yield row.request.take(tokens, accepted) if row.wanted else 0, None


def plan_drafts(lengths: Sequence[int]) -> list[Drafts]:
    """So many drafts for each row, that are still to be made."""
    return [Drafts([PLANNED] * n) if n else NO_DRAFTS for n in lengths]


def are_planned(drafts: Drafts) -> bool:
    """Whether drafts are still to be made."""
    return PLANNED in drafts.tokens[:1]


def _with_drafts(row: Row, drafts: list[int]) -> Row:
    """A row with the drafts that were made in place of the planned ones."""
    own = row.tokens[: len(row.tokens) - len(row.drafts.tokens)]
    return replace(
        row,
        tokens=[*own, *drafts],
        wanted=row.wanted and 1 + len(drafts),
        drafts=Drafts(drafts) if drafts else NO_DRAFTS,
    )
