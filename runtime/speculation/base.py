# SPDX-License-Identifier: Apache-2.0
"""What a speculator is to the scheduler: it sees what is committed, and proposes what may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Committed:
    """Tokens of one sequence that the target has committed in a step.

    Attributes:
        slot: The sequence's state slot.
        past: Position of the first of them.
        tokens: ``n + 1`` token ids: the committed ones and the one that follows, which the target has not seen.
        hidden: ``[n, H]`` float32: the target's final hidden states at the committed positions; ``None`` if the
            speculator does not need them.
    """

    slot: int
    past: int
    tokens: Sequence[int]
    hidden: NDArray[np.float32] | None


class Speculator(Protocol):
    """Proposes drafts. It never keeps anything of a draft that was not committed.

    Attributes:
        needs_hidden: Whether :meth:`observe` needs the target's hidden states.
    """

    needs_hidden: bool

    def observe(self, rows: Sequence[Committed]) -> None:
        """Take in what a step committed; a sequence's positions come without gaps, from 0."""
        ...

    def propose(self, slots: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts for sequences: at most ``lengths[i]`` tokens to follow the last token of ``slots[i]``."""
        ...
