# SPDX-License-Identifier: Apache-2.0
"""When a text ends, and which part of it the user sees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nemo_build.runtime.detokenizer import IncrementalDetokenizer
from nemo_build.runtime.params import SamplingParams

__all__ = ["FinishReason", "StepText", "StopChecker", "StopState"]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` were generated."""
    CANCELLED = "cancelled"
    """The client gave up."""
    TIMEOUT = "timeout"
    """The request's time was over."""


class _Matcher:
    """Knuth-Morris-Pratt automaton of one stop string.

    Attributes:
        matched: Length of the longest prefix of the stop string that the text so far ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # fallback[n]: longest proper border of the first n characters.
        self._fallback = [0] * (len(stop) + 1)
        border = 0
        for n in range(1, len(stop)):
            while border and stop[n] != stop[border]:
                border = self._fallback[border]
            border += stop[n] == stop[border]
            self._fallback[n + 1] = border

    def advance(self, char: str) -> bool:
        """Take one more character; whether it completes the stop string. Not to be called after that."""
        while self.matched and char != self.stop[self.matched]:
            self.matched = self._fallback[self.matched]
        self.matched += char == self.stop[self.matched]
        return self.matched == len(self.stop)


class StopChecker:
    """Finds stop strings in a text that arrives in pieces.

    The stop string that is complete first wins; of several complete at the same character the longest. So the
    decision never waits for text that has not been generated, and it does not depend on how the text is cut
    into pieces. The longest end of the text that may still become a stop string is held back (unless
    ``include_stop``: then it is shown in any case).

    Args:
        stops: Stop strings, none empty.
        include_stop: Whether the stop string itself is part of the output.

    Attributes:
        matched: The stop string found, or ``None``.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string stops nowhere")
        self.matched: str | None = None
        self._include_stop = include_stop
        # Longest first, so that the first to match at a character is the longest.
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of the text.

        Returns:
            The text to show now, and whether a stop string is complete. Text after a stop string, in this
            piece or later ones, is dropped.
        """
        if self.matched is not None:
            return "", True
        if not self._matchers:
            return text, False
        seen = self._held + text
        self._held = ""
        for end, char in enumerate(text, len(seen) - len(text) + 1):
            # Every automaton must see the character, so no short cut at the first hit.
            hits = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if hits:
                self.matched = hits[0]
                return seen[: end if self._include_stop else end - len(hits[0])], True
        if not self._include_stop:
            kept = len(seen) - max((matcher.matched for matcher in self._matchers), default=0)
            seen, self._held = seen[:kept], seen[kept:]
        return seen, False

    def finish(self) -> str:
        """End of the text: what was held back is shown after all."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class StepText:
    """What one token adds to the output.

    Attributes:
        emit: Text to show now.
        finish_reason: Why the request ends with this token, or ``None``.
        matched: The stop string, or the id of the stop token, that ended it.
    """

    emit: str
    finish_reason: FinishReason | None = None
    matched: str | int | None = None


class StopState:
    """Turns the tokens of one request into text and decides where it ends.

    A stop, by token or by string, wins over ``max_tokens`` reached at the same token. The first
    ``min_tokens`` tokens end the request only by ``max_tokens``, and no stop string is looked for in their
    text. Where a grammar lets nothing follow, any end token ends it, whatever the parameters say. The text of a
    stop token is shown only with ``include_stop`` and if the request names it (and if the detokenizer does not
    skip it). Tokens after the end are not accepted: with speculation, the rest of an accepted run is dropped.

    Args:
        params: The request's parameters.
        eos_ids: The model's own end ids.
        detokenizer: Used by nobody else.

    Attributes:
        num_tokens: Tokens so far, the stop token included.
        finish_reason: Why the request ended, or ``None`` while it runs.
    """

    def __init__(
        self, params: SamplingParams, eos_ids: Collection[int], detokenizer: IncrementalDetokenizer
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self._detokenizer = detokenizer
        self._checker = StopChecker(params.stop, include_stop=params.include_stop)

    def push(self, token: int, *, final: bool = False) -> StepText:
        """Take the next token.

        Args:
            token: The token.
            final: Whether it is an end after which nothing can follow.

        Raises:
            RuntimeError: The request has ended.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"token {token} was pushed after the end ({self.finish_reason})")
        self.num_tokens += 1
        may_stop = self.num_tokens > self._params.min_tokens
        if final or (may_stop and token in self._stop_ids):
            is_shown = self._params.include_stop and token in self._params.stop_token_ids
            text = self._detokenizer.push(token) if is_shown else ""
            return self._end(text, FinishReason.STOP, token)
        text = self._detokenizer.push(token)
        if self.num_tokens >= self._params.max_tokens:
            return self._end(text, FinishReason.LENGTH, None)
        if not may_stop:
            return StepText(text)
        emit, stopped = self._checker.push(text)
        if stopped:
            self.finish_reason = FinishReason.STOP
        return StepText(emit, self.finish_reason, self._checker.matched)

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> StepText:
        """End the request from outside; the text held back so far is shown.

        Args:
            reason: Why.

        Raises:
            RuntimeError: The request has ended.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"cancelled after the end ({self.finish_reason})")
        return self._end("", reason, None)

    def _end(self, text: str, reason: FinishReason, matched: int | None) -> StepText:
        """Flush detokenizer and checker; a stop string completed by the last text still cuts it."""
        text += self._detokenizer.finish()
        if self.num_tokens <= self._params.min_tokens:
            self.finish_reason = reason
            return StepText(text, reason, matched)
        emit, stopped = self._checker.push(text)
        if stopped and matched is None:
            self.finish_reason = FinishReason.STOP
            return StepText(emit, self.finish_reason, self._checker.matched)
        self.finish_reason = reason
        return StepText(emit + self._checker.finish(), reason, matched)
