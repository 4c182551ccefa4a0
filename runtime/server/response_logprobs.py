# SPDX-License-Identifier: Apache-2.0
"""Which log-probabilities are those of an answer's content, where thinking and calls are to have none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from nemo_build.runtime.chat import Content, Delta
from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.server.answers import is_end
from nemo_build.runtime.server.backend import Piece

__all__ = ["ContentLogprobs"]


class ContentLogprobs:
    """Finds the tokens that each delta of content came from: one answer's, piece by piece.

    A parser holds text back until it is sure what it is, and leaves tags and white space out. So tokens wait until text
    that begins with theirs is shown; those whose text was left out are dropped then.

    Attributes:
        parts: Since :meth:`begin`: of each run of neighbouring deltas of content, in order, its log-probabilities.
    """

    def __init__(self) -> None:
        self.parts: list[list[TokenLogprobs]] = []
        self._waiting: deque[tuple[str, TokenLogprobs | None]] = deque()
        self._state = "content"
        self._goes_on = False  # the last delta was content

    def begin(self) -> None:
        """Forget what was found so far; the next deltas are joined with none before."""
        self.parts = []
        self._goes_on = False

    def take(self, piece: Piece, deltas: Sequence[Delta], state: str) -> None:
        """Take a piece.

        Args:
            piece: The piece.
            deltas: What the parser made of it.
            state: Of the parser, behind it.
        """
        self._waiting.append((piece.text, None if is_end(piece) else piece.logprobs))
        before, self._state = self._state, state
        is_shown = self._show(deltas)
        if state == "reasoning" or (before == "reasoning" and not is_shown):
            self._waiting.clear()
        elif before == "tool_call" and not is_shown:
            self._waiting.pop()
        elif state == "tool_call":  # white space before a call may yet be shown, behind it
            self._waiting = deque(takewhile(lambda token: not token[0].strip(), self._waiting))

    def finish(self, deltas: Sequence[Delta]) -> None:
        """Take what the parser had held back at the end of the text."""
        self._show(deltas)

    def _show(self, deltas: Sequence[Delta]) -> bool:
        """Whether there was any content."""
        is_shown = False
        for delta in deltas:
            is_content = isinstance(delta, Content)
            if isinstance(delta, Content):
                if not self._goes_on:
                    self.parts.append([])
                self.parts[-1] += self._of(delta.text)
            self._goes_on = is_content
            is_shown |= is_content
        return is_shown

    def _of(self, text: str) -> list[TokenLogprobs]:
        """Those of the tokens that a text came from, which wait no more."""
        found: list[TokenLogprobs] = []
        wordless: list[TokenLogprobs] = []  # of tokens without text of their own, as parts of a character
        at = 0
        while at < len(text) and self._waiting:
            token, logprobs = self._waiting.popleft()
            if logprobs is not None:
                wordless.append(logprobs)
            if not token:
                continue
            shown = self._shown(text, at, token)
            if shown:
                found += wordless
                at += shown
            wordless = []
        return found

    def _shown(self, text: str, at: int, token: str) -> int:
        """How much of a text, from some place on, is a token's; what the token has behind that waits on."""
        left = len(text) - at
        if text.startswith(token, at):
            return len(token)
        is_last = not self._waiting
        if len(token) >= left:
            # Only of the piece that came last the beginning may be part of a tag.
            place = token.find(text[at:]) if is_last else token.startswith(text[at:]) - 1
            if place >= 0:
                if rest := token[place + left :]:
                    self._waiting.appendleft((rest, None))
                return left
        return left if is_last and text.endswith(token) else 0
