# SPDX-License-Identifier: Apache-2.0
"""What a speculator is to the scheduler: it sees what is committed, and proposes what may come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_build.state import StateSpec

MOST_PENDING = 16
"""Tokens of a step that the target may leave pending, at most; :meth:`Speculator.save` goes back as far."""

_TAIL = MOST_PENDING + 1
"""Last positions that are kept whether they were taken or not: a restart after n tokens may need the one before."""

_SPARE = 48
"""Positions that there is room for before what is kept is copied again."""

Taken = tuple[int, list[int], NDArray[np.float32]]
"""Positions that a drafter is fed: the first, for each the token that follows it, and the features ``[n, F]``."""

Chooser = Callable[[NDArray[np.float32]], int]
"""Picks a draft from the drafter's logits ``[V]``; called once for each draft of a sequence, in order."""


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that wants drafts.

    Attributes:
        slot: Its state slot.
        length: Most drafts, at least 1.
        choose: How one is picked from a distribution; speculators that have none do not call it.
    """

    slot: int
    length: int
    choose: Chooser


@dataclass(frozen=True)
class Proposal:
    """Drafts to follow a sequence's last token.

    Attributes:
        tokens: At most as many as were asked for.
        confidence: ``[len(tokens)]``, each in [0, 1]: how probable the drafter itself thinks it that the draft is
            accepted after those before it were. It depends on the drafts before it alone. ``None``: it does not say.
    """

    tokens: list[int]
    confidence: NDArray[np.float32] | None = None


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


class Waiting:
    """Committed positions of a sequence that a drafter was not fed yet, and a few that it was.

    Positions wait until drafts are asked for, so that speculation costs next to nothing while it is off. Those that
    were taken stay for as long as :meth:`Speculator.save` may ask for them.

    Args:
        past: The first position.
        features: ``[1, F]``: the target's output there, if it is known before the token that follows.

    Attributes:
        first: The first position that is kept.
        taken: The first that was not taken.
        tokens: For each kept position, the token that follows it.
    """

    def __init__(self, past: int, features: NDArray[np.float32] | None = None) -> None:
        self.first = self.taken = past
        self.tokens: list[int] = []
        self._count = 0  # positions whose features are kept
        self._features: NDArray[np.float32] | None = None  # and room for more of them
        if features is not None:
            self._append(features)

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self._count

    def add(self, row: Committed) -> None:
        """Append what a step committed."""
        assert row.features is not None, "the scheduler passes what the speculator asks for"
        self.tokens += self._following(row)
        self._append(row.features)

    def take(self, end: int) -> Taken:
        """Take the positions before `end`: the first, the tokens that follow, and the features ``[n, F]``.

        The features are a view, good until the next call that adds some.
        """
        assert self._features is not None
        assert end <= self.first + len(self.tokens)
        past, part = self.taken, slice(self.taken - self.first, end - self.first)
        self.taken = end
        return past, self.tokens[part], self._features[part]

    def drain(self, row: Committed, keep: int) -> Taken:
        """Append what a step committed, and take all but the last `keep` positions; for rows of many tokens.

        The features may be a view of the row's.
        """
        assert row.features is not None, "the scheduler passes what the speculator asks for"
        past, features = self.taken, row.features
        tokens = [*self.tokens[past - self.first :], *self._following(row)]
        if past < row.past and self._features is not None:
            features = np.concatenate([self._features[past - self.first : self._count], features])
        assert len(features) > _TAIL
        self.first, self.tokens = past + len(features) - _TAIL, tokens[-_TAIL:]
        self._count, self._features = 0, None
        self._append(features[-_TAIL:])
        self.taken = self.end - keep
        count = self.taken - past
        return past, tokens[:count], features[:count]

    def at(self, position: int) -> NDArray[np.float32]:
        """A copy of the features ``[F]`` at a position that is kept."""
        if self._features is None or not self.first <= position < self.end:
            raise ValueError(f"position {position} is not among {self.first}..{self.end - 1}, which are kept")
        found: NDArray[np.float32] = self._features[position - self.first].copy()
        return found

    def _following(self, row: Committed) -> Sequence[int]:
        """Tokens of a row that follow positions whose following token is not known yet."""
        assert row.past == self.end, "a sequence's positions come without gaps"
        return row.tokens[self.first + len(self.tokens) + 1 - row.past :]

    def _append(self, features: NDArray[np.float32]) -> None:
        """Copy features ``[n, F]`` to the end."""
        room = self._features
        if room is None or self._count + len(features) > len(room):
            room = self._features = self._make_room(*features.shape)
        end = self._count + len(features)
        room[self._count : end] = features
        self._count = end

    def _make_room(self, count: int, width: int) -> NDArray[np.float32]:
        """A new array with what somebody may still ask for, and room for `count` positions and some more."""
        drop = max(min(self.taken, self.end - _TAIL) - self.first, 0)
        kept = self._count - drop
        room = np.empty((kept + count + _SPARE, width), np.float32)
        if self._features is not None:
            room[:kept] = self._features[drop : self._count]
        self.first, self.tokens, self._count = self.first + drop, self.tokens[drop:], kept
        return room


def keep_short(waiting: Mapping[int, Waiting], rows: Sequence[Committed], most: int) -> list[Committed]:
    """Add rows to what waits of their slots; those with which more than `most` positions would wait are given back."""
    long = []
    for row in rows:
        positions = waiting[row.slot]
        if row.past + len(row.tokens) - 1 - positions.taken > most:
            long.append(row)
        else:
            positions.add(row)
    return long


def padded(pieces: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Rows ``[n, F]`` of several sequences as one array ``[rows, longest, F]``, zeros past a row's end.

    It is a view if there is but one.
    """
    if len(pieces) == 1:
        return pieces[0][None]
    longest = max(map(len, pieces))
    out = np.empty((len(pieces), longest, pieces[0].shape[1]), np.float32)
    for row, piece in zip(out, pieces, strict=True):
        row[: len(piece)] = piece
        row[len(piece) :] = 0
    return out


class Speculator(Protocol):
    """Proposes drafts. It never keeps anything of a draft that was not committed.

    Attributes:
        features: The target's output that :meth:`observe` needs: ``hidden``, ``taps``, or ``None``.
        states: State buffers of its graphs.
        lookahead: Those of them whose row at a position depends on tokens after it: on how many.
    """

    features: str | None
    states: Sequence[StateSpec]
    lookahead: Mapping[str, int]

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name, as views."""
        ...

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        """A sequence begins in a slot, with `tokens` committed already and the state of the slot restored to them.

        Args:
            slot: Which one; what it held before is forgotten.
            tokens: Committed tokens, possibly none. The first that :meth:`observe` is told of is the next.
            extra: What :meth:`save` returned for this position; empty without tokens.
        """
        ...

    def observe(self, rows: Sequence[Committed]) -> None:
        """Take in what a step committed; a sequence's positions come without gaps."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts for sequences, in the order of the requests."""
        ...

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        """Bring the state of a slot up to the first `committed` tokens, and return what else a restart there needs.

        Args:
            slot: Which one.
            committed: At most what :meth:`observe` was told of, and at most the tokens of a step less.
        """
        ...

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended, or left it."""
        ...
