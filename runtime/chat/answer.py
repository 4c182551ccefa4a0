# SPDX-License-Identifier: Apache-2.0
"""The text of an answer, while it comes, to reasoning, content and tool calls.

What is a tag, and what is white space between parts, is left out; every other character goes somewhere, and pieces of
any size give the same deltas joined:

- **Reasoning** is verbatim, but that one line end behind ``<think>`` is left out. That of white space only is none. It
  ends at ``</think>``, where a tool call begins, or where the text ends. A line end before ``</think>`` stays: the
  template of Nemotron 3.5 writes none of its own there, so reasoning that a client sends back gives the same prompt.
  A ``<think>`` that the model writes itself, with nothing but white space before it, is not text, and reasoning
  follows it, even if the prompt did not ask for it.
- **Content** behind reasoning or a call begins without blank lines. White space around a call is content only if other
  content stands on both sides of it. Otherwise content is verbatim; in particular it is where the prompt left no
  ``<think>`` open, as the text may go on with what the prompt began.
- A **closing tag** with nothing but white space between it and the beginning of the content, or the end of the last
  call, is left out, with this white space.
- **Calls** are read as :mod:`~nemo_build.runtime.chat.tools` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nemo_build.runtime.chat.deltas import Content, Delta, Reasoning, joined
from nemo_build.runtime.chat.scanning import SPACE, Scanner, Tags
from nemo_build.runtime.chat.tools import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER_END,
    ToolCallReader,
    signatures,
)

__all__ = ["AnswerParser", "opens_thinking"]

THINK, THINK_END = "<think>", "</think>"

_OPENING = Tags(THINK)
_REASONING = {False: Tags(THINK_END), True: Tags(THINK_END, CALL)}
_CONTENT_START = {False: Tags(THINK_END), True: Tags(THINK_END, CALL)}
_BEHIND_CALL = Tags(THINK_END, CALL_END, FUNCTION_END, PARAMETER_END, CALL, FUNCTION)
_CONTENT = Tags(CALL)

_BLANK_LINES = re.compile(r"(?:[ \t\r]*\n)+")
_TURN = "<|im_start|>"


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt leaves ``<think>`` open in its last turn, so that the answer begins with reasoning."""
    turn = prompt.rpartition(_TURN)[2]
    return turn.rfind(THINK) > turn.rfind(THINK_END)


class AnswerParser:
    """Takes one answer apart. It raises nothing, whatever the text is, and takes time linear in its length.

    Args:
        thinking: Whether the prompt left ``<think>`` open (:func:`opens_thinking`), so that the text begins inside
            reasoning.
        tools: Functions that may be called, in OpenAI's form, as the template was given them. Without any, text stays
            text.
        tool_choice: OpenAI's; with ``"none"`` text stays text. It is not checked that a call is the one that was asked
            for.
        parallel: Whether there may be more than one call. Without it calls behind the first are left out, and content
            around them is not.
        force_nonempty_content: If the text ends with neither content nor a call, its reasoning is given as content too,
            by :meth:`finish`. It stays reasoning as well: it was sent as such when it came.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = "auto",
        parallel: bool = True,
        force_nonempty_content: bool = False,
    ) -> None:
        self._reads_calls = bool(tools) and tool_choice != "none"
        self._scanner = Scanner()
        self._out: list[Delta] = []
        known = signatures(tools or ()) if self._reads_calls else {}
        self._calls = ToolCallReader(
            self._scanner, known, parallel=parallel, begins=self._behind_call, send=self._out.append
        )
        self._state: Callable[[], bool] = self._opening
        self._thinking = thinking
        self._lead: list[str] = []  # white space before any text of the reasoning
        self._has_reasoning = False
        self._thought: list[str] | None = [] if force_nonempty_content else None
        self._space: list[str] = []  # white space of the content that is text only if text follows
        self._gap: list[str] = []  # likewise, but not if a closing tag follows
        self._has_content = False
        self._starts = True  # nothing but white space since the beginning of the content or the last call
        self._is_behind_call = False
        self._trims = False  # whether content that begins now begins without blank lines

    @property
    def state(self) -> Literal["reasoning", "content", "tool_call"]:
        """What the text belonged to up to here."""
        if self._calls.in_call:
            return "tool_call"
        if self._state == self._reasoning or (self._state == self._opening and self._thinking):
            return "reasoning"
        return "content"

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun so far."""
        return self._calls.calls > 0

    @property
    def is_call_cut(self) -> bool:
        """Whether the end of the text cut off the last call: neither its tags nor other text ended it."""
        return self._calls.is_cut

    def push(self, text: str) -> list[Delta]:
        """What more text of the answer gives, so far as it is sure what it is."""
        self._scanner.add(text)
        return self._read()

    def finish(self) -> list[Delta]:
        """The end of the text: what was held back."""
        self._scanner.ended = True
        deltas = self._read()
        is_verbatim = not self._is_behind_call if self._has_content else not self._trims
        last = "".join(self._space) if is_verbatim else ""
        self._space.clear()
        if self._thought and not self._has_content and not self.has_tool_calls:
            last = "".join(self._thought)
        return joined([*deltas, Content(last)] if last else deltas)

    def _read(self) -> list[Delta]:
        while self._calls.step() if self._calls.active else self._state():
            pass
        deltas = joined(self._out)
        self._out.clear()
        return deltas

    # --- reasoning -------------------------------------------------------------------------------------------

    def _opening(self) -> bool:
        """The beginning of the text: is there a ``<think>`` of the model's own?"""
        self._lead.append(self._scanner.space())
        tag = self._scanner.next_of(_OPENING)
        if tag is None:
            return False
        if tag or self._thinking:
            if tag:
                self._lead.clear()
            self._state = self._reasoning
        else:
            self._space, self._lead = self._lead, []
            self._state = self._content
        return True

    def _reasoning(self) -> bool:
        text, tag = self._scanner.until(_REASONING[self._reads_calls])
        self._reasoning_text(text)
        if tag == CALL:
            self._calls.open(tag, self._reasoning_text, any_name=False)
        elif tag:
            self._state = self._content
            self._trims = True
        return bool(tag)

    def _reasoning_text(self, text: str) -> None:
        if not self._has_reasoning:
            self._lead.append(text)
            if not text.strip(SPACE):
                return
            text = "".join(self._lead).removeprefix("\n")
            self._has_reasoning = True
        if not text:
            return
        self._out.append(Reasoning(text))
        if self._thought is not None:
            self._thought.append(text)

    # --- content ---------------------------------------------------------------------------------------------

    def _behind_call(self) -> None:
        """A call begins, which ends reasoning too; what follows it is content."""
        self._state = self._content
        self._starts = self._is_behind_call = self._trims = True

    def _content(self) -> bool:
        if self._starts:
            return self._content_start()
        if not self._reads_calls:
            self._content_text(self._scanner.rest())
            return False
        text, tag = self._scanner.until(_CONTENT)
        self._content_text(text)
        if tag:
            self._calls.open(tag, self._content_text, any_name=True)
        return bool(tag)

    def _content_start(self) -> bool:
        self._gap.append(self._scanner.space())
        tags = _BEHIND_CALL if self._is_behind_call else _CONTENT_START[self._reads_calls]
        tag = self._scanner.next_of(tags)
        if tag is None:
            return False
        if tag not in ("", CALL, FUNCTION):
            self._gap.clear()
            self._trims = True
            return True
        self._space += self._gap
        self._gap.clear()
        if tag:
            self._calls.open(tag, self._content_text, any_name=tag == CALL)
        else:
            if self._is_behind_call:
                self._scanner.drop_cut(tags)
            self._starts = False
        return True

    def _content_text(self, text: str) -> None:
        body = text.rstrip(SPACE)
        if not body:
            self._space.append(text)
            return
        shown = "".join(self._space) + body
        self._space = [text[len(body) :]]
        if self._trims and not self._has_content and (blank := _BLANK_LINES.match(shown)):
            shown = shown[blank.end() :]
        self._has_content = True
        self._starts = self._is_behind_call = False
        self._out.append(Content(shown))
