# SPDX-License-Identifier: Apache-2.0
"""What a constraint is, and how one is asked along drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Constraint", "Guide", "Mask", "allow", "allows", "only", "without"]

Mask = NDArray[np.uint8] | None
"""``[ceil(V / 8)]``, a bit for each token, the lowest of a byte first: which are allowed, some are; ``None``: all."""

_PENALTIES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0,
    np.float32(0),
    np.float32(-np.inf),
)
"""``[256, 8]``: for the bits of a byte what is added to the logits. A choice by bool takes ten times as long."""

_UNKNOWN = object()


def only(size: int, tokens: Iterable[int]) -> NDArray[np.uint8]:
    """A mask of V = `size` that allows these tokens."""
    allowed = np.zeros(size, np.bool_)
    allowed[list(tokens)] = True
    return np.packbits(allowed, bitorder="little")


def without(size: int, tokens: Iterable[int]) -> NDArray[np.uint8]:
    """A mask of V = `size` that allows all but these tokens."""
    return ~only(size, tokens)


def allow(mask: NDArray[np.uint8], tokens: Iterable[int]) -> None:
    """Allow more tokens."""
    for token in tokens:
        mask[token >> 3] |= 1 << (token & 7)


def allows(mask: Mask, token: int) -> bool:
    """Whether a token is allowed."""
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)


class Constraint(ABC):
    """Says which tokens may come next, and follows those that do. Used by one thread at a time."""

    @abstractmethod
    def mask(self) -> Mask:
        """The tokens that may come next. Nobody changes the array.

        Raises:
            RequestError: The library's limits do not suffice for the grammar at this place.
        """

    @abstractmethod
    def advance(self, token: int) -> None:
        """Take a token that the mask allows.

        Raises:
            RequestError: It does not allow it; the token is taken all the same, and can be rolled back.
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take the last tokens back, at most :data:`~nemo_build.runtime.speculation.base.MOST_PENDING` of them."""

    @abstractmethod
    def forced(self) -> Sequence[int]:
        """Tokens that are to be expected next because the text has hardly another choice; often none. Drafts only."""

    @property
    def done(self) -> bool:
        """Whether everything is allowed from here on, for ever."""
        return False

    @property
    def finished(self) -> bool:
        """Whether the token that ended the text is the last one; nothing can follow."""
        return False


class Guide:
    """A constraint, asked at the end of the text or behind drafts that might follow it.

    It goes where it is asked, and remembers the masks on the way, so that drafts need no cleaning up, and a place that
    drafts were chosen at costs nothing when they are verified.

    Args:
        constraint: At the end of the text. Used by nobody else.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._ahead: list[int] = []  # drafts that the constraint has taken
        self._masks: list[object] = [_UNKNOWN]  # after each of them, and before the first

    @property
    def done(self) -> bool:
        """Whether the constraint allows everything for ever."""
        return not self._ahead and self._constraint.done

    @property
    def finished(self) -> bool:
        """Whether the text has ended, drafts aside."""
        if not self._constraint.finished:  # which drafts do not take back
            return False
        self._go(())
        return self._constraint.finished

    def mask(self, drafts: Sequence[int] = ()) -> Mask:
        """The tokens that may come after drafts.

        Raises:
            RequestError: As of :meth:`Constraint.mask`.
        """
        self._go(drafts)
        if self._masks[-1] is _UNKNOWN:
            self._masks[-1] = self._constraint.mask()
        return self._masks[-1]  # type: ignore[return-value]

    def masked(self, logits: NDArray[np.float32], drafts: Sequence[int] = ()) -> NDArray[np.float32]:
        """Logits ``[V]`` after drafts, with ``-inf`` where a token is not allowed; a new array, unless all are.

        NaN stays NaN, and ``+inf`` that is not allowed becomes it: both are defects of whoever computed them.

        Raises:
            RequestError: As of :meth:`Constraint.mask`.
        """
        mask = self.mask(drafts)
        if mask is None:
            return logits
        masked: NDArray[np.float32] = _PENALTIES.take(mask, axis=0).ravel()[: len(logits)]
        with np.errstate(invalid="ignore"):
            masked += logits
        return masked

    def commit(self, token: int) -> None:
        """A token has been added to the text."""
        if self._ahead and self._ahead[0] == token:
            del self._ahead[0], self._masks[0]
            return
        self._go(())
        self._constraint.advance(token)
        self._masks = [_UNKNOWN]

    def corrected(self, drafts: Sequence[int], most: int) -> list[int]:
        """Drafts that were made without the masks, as far as they are allowed, or what must stand in their place.

        Args:
            drafts: Token ids.
            most: How many there may be.
        """
        taken: list[int] = []
        while len(taken) < most:
            self._go(taken)
            forced = self._constraint.forced()
            if forced:
                taken += forced[: most - len(taken)]
            elif taken == list(drafts[: len(taken)]) and len(drafts) > len(taken):
                token = drafts[len(taken)]
                if not allows(self.mask(taken), token):
                    break
                taken.append(token)
            else:
                break
        return taken

    def _go(self, drafts: Sequence[int]) -> None:
        """Be behind these drafts."""
        ahead = self._ahead
        same = 0
        while same < min(len(ahead), len(drafts)) and ahead[same] == drafts[same]:
            same += 1
        if same < len(ahead):
            self._constraint.rollback(len(ahead) - same)
            del ahead[same:], self._masks[same + 1 :]
        for token in drafts[same:]:
            ahead.append(token)
            self._masks.append(_UNKNOWN)
            self._constraint.advance(token)
