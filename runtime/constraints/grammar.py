# SPDX-License-Identifier: Apache-2.0
"""A grammar's constraint: the matcher of llguidance, and the tokens that end the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.base import Constraint, Mask, allow, only
from nemo_build.runtime.constraints.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance

__all__ = ["GrammarConstraint", "first_lines"]

_MOST_MESSAGE = 400
"""Characters of the library's messages that are passed on; they may hold the whole grammar."""


class GrammarConstraint(Constraint):
    """Follows a grammar. Where it may be complete, the text may end, and where nothing else can follow it has to.

    Args:
        begin: Makes a matcher that has seen nothing.
        vocabulary: The model's tokens.
        ends: Ids that end the text.
    """

    def __init__(
        self, begin: Callable[[], llguidance.LLMatcher], vocabulary: Vocabulary, ends: Collection[int]
    ) -> None:
        self._begin, self._matcher = begin, begin()
        self._vocabulary, self._ends = vocabulary, list(ends)
        self._fed: list[int] = []
        self._after = 0  # tokens since the end

    @property
    def finished(self) -> bool:
        """As of the base class."""
        return self._after > 0

    def mask(self) -> Mask:
        """As of the base class."""
        if self._after:
            return only(self._vocabulary.size, self._ends)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.zeros((self._vocabulary.size + 7) // 8, np.uint8)
        used = min(len(bits), len(mask))  # the library's end at a multiple of 32
        mask[:used] = bits[:used]
        if self._matcher.is_accepting():
            allow(mask, self._ends)
        return mask

    def advance(self, token: int) -> None:
        """As of the base class."""
        is_end = token in self._ends
        if self._after or (is_end and not self._matcher.validate_tokens([token])):
            self._after += 1
            return
        self._fed.append(token)
        if not self._matcher.consume_token(token):
            self._check()

    def rollback(self, count: int) -> None:
        """As of the base class."""
        after = min(count, self._after)
        self._after -= after
        if count == after:
            return
        del self._fed[len(self._fed) - (count - after) :]
        if self._matcher.is_error() or not self._matcher.rollback(count - after):
            # A matcher never leaves an error, which the drafts that are taken back may have led to.
            self._matcher = self._begin()
            self._matcher.consume_tokens(self._fed)

    def forced(self) -> Sequence[int]:
        """As of the base class."""
        if self._after or self._matcher.is_accepting():
            return ()
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = first_lines(self._matcher.get_error())
            raise RequestError("The text cannot go on within the grammar.", [problem])


def first_lines(message: str) -> str:
    """The beginning of one of the library's messages, in one line."""
    text = " ".join(message.partition("<state>")[0].split())
    return text if len(text) <= _MOST_MESSAGE else text[:_MOST_MESSAGE] + " ..."
