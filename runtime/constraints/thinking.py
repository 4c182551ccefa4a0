# SPDX-License-Identifier: Apache-2.0
"""Thinking, which comes first: how long it may be, and what the text behind it has to look like.

The prompt has opened ``<think>``. The text is free up to ``</think>``, or up to a tool call, which ends the thinking as
well. Both are looked for in the bytes of the text, so that it does not matter how they are cut into tokens. Without a
grammar a ``<tool_call>`` may only be talked about, so it is a call where :class:`~nemo_build.runtime.chat.AnswerParser`
reads one: if the name of a function that there is follows, in either form.

If a grammar follows, the thinking may not end within a token whose rest would escape that grammar, nor may the text end
in it, nor may a tool call begin that the grammar does not know.

Once the budget is used up the tokens of ``</think>`` are the only ones allowed, one by one. With a grace the thinking
goes on until a line ends, for at most so many tokens. Where a call may be beginning, it goes on until that is known,
for at most :data:`MOST_BEGINNING` tokens.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from nemo_build.runtime.constraints.base import Constraint, Mask, only, without
from nemo_build.runtime.constraints.vocabulary import THINK_END, TOOL_CALL, TOOL_CALL_END, Vocabulary
from nemo_build.runtime.params import Thinking
from nemo_build.runtime.speculation.base import MOST_PENDING

__all__ = ["MOST_BEGINNING", "ThinkingFirst"]

MOST_BEGINNING = 32
"""Tokens for which the end waits beyond budget and grace where a call may be beginning: its mark, and a long name."""

_END, _CALL = THINK_END.encode(), TOOL_CALL.encode()
_MARK = re.compile(b"|".join(map(re.escape, (_END, _CALL))))

_SPACE, _FUNCTION = b" \t\r\n", b"<function="
_NAME_END = re.compile(b"[><\n]")
_LONGEST_NAME = 1024
"""Bytes."""
_FIRST = b'"name"'
_JSON_END = re.compile(b"|".join(map(re.escape, (TOOL_CALL_END.encode(), _CALL, _END))))


class _Place(NamedTuple):
    """Where the text is.

    Attributes:
        taken: Tokens of thinking so far.
        tail: The last bytes, as many as may be the beginning of a mark, or those from a ``<tool_call>`` on that may yet
            be a call.
        forced: How many tokens of the forced end there are; -1: it is not forced.
        over: Whether the thinking has ended.
        passed: Whether the last token went to the grammar.
    """

    taken: int
    tail: bytes
    forced: int
    over: bool = False
    passed: bool = False


class ThinkingFirst(Constraint):
    """Thinking, perhaps with a budget, and perhaps with a grammar behind it.

    Args:
        vocabulary: The model's tokens.
        budget: How long it may be; ``None``: as long as it takes.
        then: What the text behind it obeys; ``None``: nothing.
        knows_calls: Whether that knows tool calls, so that one may end the thinking.
        ends: Ids that end the text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        budget: Thinking | None,
        then: Constraint | None,
        *,
        knows_calls: bool,
        ends: Collection[int],
    ) -> None:
        self._vocabulary, self._budget, self._then = vocabulary, budget, then
        self._call = vocabulary.single(TOOL_CALL) if knows_calls else None
        self._ends = list(ends)
        self._end = vocabulary.ids_of(THINK_END)
        self._functions = frozenset(budget.calls if budget is not None else ())
        self._free: dict[tuple[bytes, bytes], Mask] = {}
        self._place = self._begin_end(_Place(0, b"", -1), line_ends=False)
        self._past: deque[_Place] = deque(maxlen=MOST_PENDING)

    @property
    def done(self) -> bool:
        """As of the base class."""
        return self._place.over and (self._then is None or self._then.done)

    @property
    def finished(self) -> bool:
        """As of the base class."""
        return self._place.over and self._then is not None and self._then.finished

    def mask(self) -> Mask:
        """As of the base class."""
        place = self._place
        if place.over:
            return None if self._then is None else self._then.mask()
        if place.forced >= 0:
            return only(self._vocabulary.size, [self._end[place.forced]])
        return None if self._then is None else self._freely(place.tail)

    def advance(self, token: int) -> None:
        """As of the base class."""
        place = self._place
        if place.over:
            passed = self._then is not None
        else:
            place = self._think(place, token)
            passed = place.over and self._then is not None and token == self._call
        self._past.append(self._place)
        self._place = place._replace(passed=passed)
        if passed and self._then is not None:
            self._then.advance(token)

    def rollback(self, count: int) -> None:
        """As of the base class."""
        passed = 0
        for _ in range(count):
            passed += self._place.passed
            self._place = self._past.pop()
        if passed and self._then is not None:
            self._then.rollback(passed)

    def forced(self) -> Sequence[int]:
        """As of the base class."""
        place = self._place
        if place.over:
            return () if self._then is None else self._then.forced()
        return self._end[place.forced :] if place.forced >= 0 else ()

    def _think(self, place: _Place, token: int) -> _Place:
        """A token of thinking, which may be its last."""
        data = self._vocabulary.tokenizer.token_bytes(token)
        tail = self._tail(place.tail + data)
        if tail is None:
            return _Place(place.taken + 1, b"", -1, over=True)
        forced = place.forced
        if forced >= 0:
            forced += token == self._end[forced]
        after = _Place(place.taken + 1, tail, forced)
        return after if forced >= 0 else self._begin_end(after, line_ends=data.endswith(b"\n"))

    def _tail(self, text: bytes) -> bytes | None:
        """What is to be kept of a text; ``None``: it ends the thinking."""
        start = 0
        while mark := _MARK.search(text, start):
            if mark.group() == _END or self._then is not None:
                return None  # with a grammar only those marks of calls are allowed that it knows
            start = mark.end()
            is_call = _begins_call(text[start:], self._functions)
            if is_call is None:
                return text[mark.start() :]
            if is_call:
                return None
        return text[max(start, len(text) - len(_CALL) + 1) :]

    def _begin_end(self, place: _Place, *, line_ends: bool) -> _Place:
        """The same place, but that the end is forced from here on if it is time."""
        if self._budget is None:
            return place
        over = place.taken - self._budget.budget
        is_time = over >= self._budget.grace or (over >= 0 and line_ends)
        if place.tail.startswith(_CALL) and over < self._budget.grace + MOST_BEGINNING:
            is_time = False
        return place._replace(forced=0) if is_time else place

    def _freely(self, tail: bytes) -> Mask:
        """What thinking that a grammar follows may go on with."""
        begun = _begun(_END, tail), _begun(_CALL, tail)
        if begun not in self._free:
            beyond = self._vocabulary.completing(_END, begun[0])[1]
            calls, beyond_calls = self._vocabulary.completing(_CALL, begun[1])
            calls = [token for token in calls if token != self._call]
            mask = without(self._vocabulary.size, [*self._ends, *beyond, *calls, *beyond_calls])
            self._free[begun] = mask
        return self._free[begun]


def _begun(mark: bytes, tail: bytes) -> bytes:
    """The longest beginning of a mark that a text ends with, short of all of it."""
    return next((mark[:n] for n in range(len(mark) - 1, 0, -1) if tail.endswith(mark[:n])), b"")


def _begins_call(text: bytes, functions: Collection[str]) -> bool | None:
    """Whether there is a call of one of these functions behind its mark; ``None``: more text must decide."""
    if not functions:
        return False
    text = text.lstrip(_SPACE)
    if _FUNCTION.startswith(text[: len(_FUNCTION)]):
        name = text[len(_FUNCTION) :]
        end = _NAME_END.search(name)
        if end is None:
            return None if len(name) <= _LONGEST_NAME else False
        return end.group() == b">" and _text(name[: end.start()]) in functions
    if text.startswith(b"{"):
        first = text[1:].lstrip(_SPACE)[: len(_FIRST)]
        if not _FIRST.startswith(first):
            return False
        end = _JSON_END.search(text)
        return None if end is None else _json_name(text[: end.start()]) in functions
    return False


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _json_name(data: bytes) -> str | None:
    """The function that a JSON object calls."""
    try:
        call = json.loads(_text(data))
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    is_call = isinstance(name, str) and isinstance(call.get("arguments", call.get("parameters", {})), dict)
    return name if is_call else None
