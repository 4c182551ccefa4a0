# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup for the sequences of a batch; see :mod:`nemo_build.runtime.speculation.ngram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from nemo_build.runtime.speculation.base import Committed, DraftRequest, Proposal
from nemo_build.runtime.speculation.ngram import NgramDrafter
from nemo_build.state import StateSpec


class LookupSpeculator:
    """Proposes what followed the last tokens when they occurred before in the same sequence.

    It implements :class:`~nemo_build.runtime.speculation.base.Speculator`, has no state buffers and no distributions.
    """

    features: str | None = None

    def __init__(self) -> None:
        self.states: Sequence[StateSpec] = ()
        self.lookahead: Mapping[str, int] = {}
        self._drafters: dict[int, NgramDrafter] = {}

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Nothing."""
        return {}

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        """Index the tokens that are there already."""
        self._drafters[slot] = NgramDrafter(tokens)

    def observe(self, rows: Sequence[Committed]) -> None:
        """Index the committed tokens, and the one that follows them."""
        for row in rows:
            drafter = self._drafters[row.slot]
            drafter.extend(row.tokens[len(drafter) - row.past :])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts by request."""
        return [Proposal(self._drafters[r.slot].propose(r.length)) for r in requests]

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        """Nothing is needed but the tokens."""
        return {}

    def release(self, slot: int) -> None:
        """Forget the sequence."""
        self._drafters.pop(slot, None)
