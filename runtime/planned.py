# SPDX-License-Identifier: Apache-2.0
"""Rows whose drafts are planned as counts: what they are, and which tokens are chosen, comes back with the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_build.engines.session import StepOutput
from nemo_build.runtime.sampling import NonFiniteLogitsError, TokenLogprobs
from nemo_build.runtime.speculation.rounds import NO_DRAFTS, Drafts
from nemo_build.runtime.steps import Computed, Row

PLANNED = -1
"""Stands for a draft that is still to be made."""


@dataclass(frozen=True)
class Chosen(Computed):
    """Rows whose tokens were chosen as well.

    Attributes:
        tokens: Those that follow each row's last one; ``None`` where its logits are unusable, an error where
            something else keeps it from going on.
        accepted: How many of the first of these were drafts.
        logprobs: The log-probabilities of each row's tokens, where they were asked for.
    """

    tokens: Sequence[Sequence[int] | Exception | None]
    accepted: Sequence[int]
    logprobs: Sequence[Sequence[TokenLogprobs] | None]

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        drafts: Sequence[list[int]],
        tokens: Sequence[Sequence[int] | Exception | None],
        accepted: Sequence[int],
        seconds: float,
        logprobs: Sequence[Sequence[TokenLogprobs] | None] | None = None,
    ) -> Chosen:
        """What came back for rows with planned drafts: the drafts that were made, and what was chosen."""
        made = [_with_drafts(row, d) for row, d in zip(rows, drafts, strict=True)]
        found = [None] * len(made) if logprobs is None else logprobs
        return cls(made, StepOutput(np.empty((0, 0), np.float32)), seconds, tokens, accepted, found)

    def take(self) -> Iterator[tuple[int, None]]:
        """Let each request take its tokens: how many drafts were accepted. There are no features on the host."""
        taken = zip(self.rows, self.tokens, self.accepted, self.logprobs, strict=True)
        for row, tokens, accepted, logprobs in taken:
            if tokens is None:
                tokens = NonFiniteLogitsError("the engine's logits are unusable: they are not all finite")
            if isinstance(tokens, Exception):
                row.request.error = tokens
                yield 0, None
            else:
                yield row.request.take(tokens, accepted, logprobs) if row.wanted else 0, None


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
