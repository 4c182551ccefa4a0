# SPDX-License-Identifier: Apache-2.0
"""What a speculator is to the scheduler: it sees what is committed, and proposes what may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        features: ``[n, F]`` float32: the target's output at the committed positions that the speculator asks for;
            ``None`` if it needs none.
    """

    slot: int
    past: int
    tokens: Sequence[int]
    features: NDArray[np.float32] | None


@dataclass
class Waiting:
    """Committed positions of a sequence that a drafter has not seen yet.

    They wait until drafts are asked for, so that speculation costs next to nothing while it is off.

    Attributes:
        past: The first of them.
        tokens: For each, the token that follows it.
        features: For each, the target's output at it; in pieces.
    """

    past: int
    tokens: list[int] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, row: Committed) -> None:
        """Append what a step committed."""
        assert row.features is not None, "the scheduler passes what the speculator asks for"
        self.tokens += row.tokens[1:]
        self.features.append(row.features.copy())

    def take(self, count: int) -> tuple[int, list[int], NDArray[np.float32]]:
        """Remove the first `count` positions: the first, the tokens that follow, and the features ``[count, F]``."""
        past, tokens, features = self.past, self.tokens[:count], np.concatenate(self.features)
        self.past += count
        self.tokens, self.features = self.tokens[count:], [features[count:]]
        return past, tokens, features[:count]


def padded(pieces: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Rows ``[n, F]`` of several sequences as one array ``[rows, longest, F]``, zeros past a row's end."""
    out = np.zeros((len(pieces), max(map(len, pieces)), pieces[0].shape[1]), np.float32)
    for row, piece in zip(out, pieces, strict=True):
        row[: len(piece)] = piece
    return out


class Speculator(Protocol):
    """Proposes drafts. It never keeps anything of a draft that was not committed.

    Attributes:
        features: The target's output that :meth:`observe` needs: ``hidden``, ``taps``, or ``None``.
    """

    features: str | None

    def observe(self, rows: Sequence[Committed]) -> None:
        """Take in what a step committed; a sequence's positions come without gaps, from 0."""
        ...

    def propose(self, slots: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts for sequences: at most ``lengths[i]`` tokens to follow the last token of ``slots[i]``."""
        ...
