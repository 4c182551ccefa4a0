# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup for the sequences of a batch; see :mod:`nemo_build.runtime.speculation.ngram`."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_build.runtime.speculation.base import Committed
from nemo_build.runtime.speculation.ngram import NgramDrafter


class LookupSpeculator:
    """Proposes what followed the last tokens when they occurred before in the same sequence."""

    features: str | None = None

    def __init__(self) -> None:
        self._drafters: dict[int, NgramDrafter] = {}

    def observe(self, rows: Sequence[Committed]) -> None:
        """Index the committed tokens; see :class:`~nemo_build.runtime.speculation.base.Speculator`."""
        for row in rows:
            if row.past == 0:
                self._drafters[row.slot] = NgramDrafter(row.tokens[:1])
            self._drafters[row.slot].extend(row.tokens[1:])

    def propose(self, slots: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts; see :class:`~nemo_build.runtime.speculation.base.Speculator`."""
        return [self._drafters[slot].propose(n) for slot, n in zip(slots, lengths, strict=True)]
