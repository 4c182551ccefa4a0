# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the text of an answer.

The form is the one that the family's template shows to the model::

    <tool_call>
    <function=NAME>
    <parameter=ARGUMENT>
    VALUE
    </parameter>
    </function>
    </tool_call>

Also read is ``<tool_call>{"name": NAME, "arguments": {...}}</tool_call>``, which comes whole. What models get wrong is
mended, and what is no call stays text:

- A call begins where a ``<tool_call>`` is followed by ``<function=NAME>``, with white space between them at most. In
  content, NAME may be any well-formed name: a client can answer that there is no such function, so that the model
  mends it, and would never know of a call that came as text. Within reasoning and within a value the form is often
  only quoted, so there NAME must be that of a tool.
- Of a value, one line end is left out at each side; all else of it is verbatim. A ``</parameter>`` ends it if, after
  white space, a tag follows that may follow there, or the text ends. Otherwise it is part of the value, for example of
  XML that the model writes.
- Where ``</parameter>`` is missing, these end a value, at the beginning of a line: the ``<parameter=`` of a parameter
  that the tool has and that was not given yet; ``</function>`` before ``</tool_call>``, another function, another call
  or the end; ``</tool_call>`` before another call or the end; a whole ``<tool_call>`` and ``<function=NAME>`` of a
  tool.
- Of two parameters of one name the first counts, for its text may have been sent already.
- Text that is no tag, where a parameter or ``</function>`` should come, ends the call, and is content.
- Where the text ends within a call, what came counts, and the call is told to be cut off. What the end left of a
  tag is left out between parameters, and of a closing tag in a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from nemo_build.runtime.chat.argument_types import encode
from nemo_build.runtime.chat.arguments import ArgumentWriter, Signature
from nemo_build.runtime.chat.deltas import Delta, ToolCallArguments, ToolCallStart
from nemo_build.runtime.chat.scanning import Scanner, Tags

__all__ = ["CALL", "CALL_END", "FUNCTION", "FUNCTION_END", "PARAMETER_END", "ToolCallReader", "signatures"]

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_OPENINGS = Tags(FUNCTION, "{")
_JSON_NAME = Tags('"name"')
_JSON_ENDS = Tags(CALL_END, CALL, "</think>")
_NAME_ENDS = Tags(">", "<", "\n")
_PARAMETER_NAME_ENDS = Tags(">", "\n")
_IN_FUNCTION = Tags(PARAMETER, FUNCTION_END, CALL_END, CALL, FUNCTION)
_IN_VALUE = Tags(PARAMETER_END, PARAMETER, FUNCTION_END, CALL_END, CALL)
_FOLLOWERS = {
    PARAMETER_END: Tags(PARAMETER, FUNCTION_END, CALL_END, CALL),
    FUNCTION_END: Tags(CALL_END, CALL, FUNCTION),
    CALL_END: Tags(CALL),
}
"""What may follow a tag that ends a value."""

_LONGEST_NAME = 256
_WELL_FORMED = re.compile(rf"[\w.:/-]{{1,{_LONGEST_NAME}}}")


def signatures(tools: Sequence[Mapping[str, Any]]) -> dict[str, Signature]:
    """What is known of each function, from tools in OpenAI's form that a template took."""
    functions = [tool.get("function", tool) for tool in tools]
    return {f["name"]: Signature(f.get("parameters")) for f in functions}


class ToolCallReader:
    """Reads calls, from behind their first tag on.

    Args:
        scanner: The text.
        known: The functions that there are.
        parallel: Whether there may be more than one call; without it, the others are read and left out.
        begins: Told when a call begins, which ends whatever text was before it.
        send: Gets the deltas.

    Attributes:
        calls: How many there were so far.
        is_cut: Whether the end of the text cut off the last call that was sent.
    """

    def __init__(
        self,
        scanner: Scanner,
        known: Mapping[str, Signature],
        *,
        parallel: bool,
        begins: Callable[[], None],
        send: Callable[[Delta], None],
    ) -> None:
        self.calls = 0
        self.is_cut = False
        self._scanner = scanner
        self._known = known
        self._parallel = parallel
        self._begins = begins
        self._send = send
        self._state: Callable[[], bool] | None = None
        self._writer: ArgumentWriter | None = None
        # While it is open whether something is a tag, or a call:
        self._held: list[str] = []
        self._give_back: Callable[[str], None] = self._value_text
        self._any_name = False
        self._name: list[str] = []
        # Within a value:
        self._has_begun = False
        self._is_line_end_held = False
        self._at_line_start = False

    @property
    def active(self) -> bool:
        """Whether the next text is this reader's."""
        return self._state is not None

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._writer is not None

    def open(self, tag: str, give_back: Callable[[str], None], *, any_name: bool) -> None:
        """Look whether a call begins.

        Args:
            tag: What was read: ``<tool_call>``, or ``<function=`` right behind a call.
            give_back: Gets the text if none does.
            any_name: Whether the function may be one that is not known.
        """
        self._held, self._name = [tag], []
        self._give_back = give_back
        self._any_name = any_name
        self._state = self._function_name if tag == FUNCTION else self._opening

    def step(self) -> bool:
        """Read on, if :attr:`active`; whether there was anything to do without more text."""
        assert self._state is not None
        return self._state()

    # --- whether it is a call --------------------------------------------------------------------------------

    def _is_text(self) -> bool:
        """What was held back is text after all; within a call, that of the value."""
        self._state = self._value if self.in_call else None
        self._give_back("".join(self._held))
        return True

    def _opening(self) -> bool:
        self._held.append(self._scanner.space())
        tag = self._scanner.next_of(_OPENINGS)
        if tag is None:
            return False
        if tag == "" or (tag == "{" and self.in_call):
            self._scanner.back(tag)
            return self._is_text()
        self._held.append(tag)
        self._state = self._function_name if tag == FUNCTION else self._json_opening
        return True

    def _function_name(self) -> bool:
        name, end = self._read_name()
        if end == ">" and self._may_call(name):
            self._start(name)
            self._state = self._function
            return True
        if end or self._scanner.ended or len(name) > _LONGEST_NAME:
            self._scanner.back(end)
            return self._is_text()
        return False

    def _read_name(self) -> tuple[str, str]:
        """What there is of a name that is held back, and what ended it."""
        text, end = self._scanner.until(_NAME_ENDS)
        self._held.append(text)
        self._name.append(text)
        return "".join(self._name), end

    def _may_call(self, name: str) -> bool:
        return name in self._known or (self._any_name and _WELL_FORMED.fullmatch(name) is not None)

    def _json_opening(self) -> bool:
        self._held.append(self._scanner.space())
        tag = self._scanner.next_of(_JSON_NAME)
        if tag is None:
            return False
        self._held.append(tag)
        if tag == "":
            return self._is_text()
        self._state = self._json
        return True

    def _json(self) -> bool:
        text, end = self._scanner.until(_JSON_ENDS)
        self._held.append(text)
        if not end and not self._scanner.ended:
            return False
        self._scanner.back(end)
        name, arguments = _json_call("".join(self._held[1:]))
        if not self._may_call(name):
            return self._is_text()
        self._start(name)
        self._send_arguments(arguments)
        self._writer = self._state = None
        return True

    # --- the call --------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        if self.in_call:  # a value was read, whose end is missing like that of its call
            self._end_value()
            self._close()
        self._begins()
        if self._parallel or self.calls == 0:
            self._send(ToolCallStart(self.calls, f"call_{token_hex(12)}", name))
        self.calls += 1
        self._writer = ArgumentWriter(self._known.get(name) or Signature(), self._send_arguments)

    def _send_arguments(self, text: str) -> None:
        if self._parallel or self.calls == 1:
            self._send(ToolCallArguments(self.calls - 1, text))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._state = None

    def _cut(self) -> None:
        """The text ends within the call."""
        self.is_cut = self._parallel or self.calls == 1
        self._close()

    def _function(self) -> bool:
        """Between the parameters."""
        self._scanner.space()
        tag = self._scanner.next_of(_IN_FUNCTION)
        if tag is None:
            return False
        if tag == PARAMETER:
            self._name = []
            self._state = self._parameter_name
        else:
            self._scanner.drop_cut(_IN_FUNCTION)
            if tag in (CALL, FUNCTION):
                self._scanner.back(tag)
            if tag or not self._scanner.ended:
                self._close()
            else:
                self._cut()
        return True

    def _parameter_name(self) -> bool:
        text, end = self._scanner.until(_PARAMETER_NAME_ENDS)
        self._name.append(text)
        if end:
            self._begin_value("".join(self._name))
            self._has_begun = end == "\n"
        elif self._scanner.ended:
            self._cut()
        return bool(end)

    # --- a value ---------------------------------------------------------------------------------------------

    def _begin_value(self, name: str) -> None:
        assert self._writer is not None
        self._writer.begin(name)
        self._has_begun = self._is_line_end_held = False
        self._at_line_start = True
        self._state = self._value

    def _value_text(self, text: str) -> None:
        """More of the value: without the line end at its beginning, and holding back one at its end."""
        assert self._writer is not None
        if text and not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        if not text:
            return
        if self._is_line_end_held:
            text = "\n" + text
        self._is_line_end_held = self._at_line_start = text.endswith("\n")
        self._writer.text(text[:-1] if self._is_line_end_held else text)

    def _value(self) -> bool:
        text, tag = self._scanner.until(_IN_VALUE)
        if not tag and self._scanner.ended:
            if not (text.startswith("</") and _IN_VALUE.may_begin(text)):
                self._value_text(text)
            self._end_value()
            self._cut()
            return True
        self._value_text(text)
        if tag != PARAMETER_END and not self._at_line_start:
            self._value_text(tag)
        elif tag == CALL:
            self.open(tag, self._value_text, any_name=False)
        elif tag:
            self._held, self._name = [tag], []
            self._give_back = self._value_text
            self._state = self._next_name if tag == PARAMETER else self._value_end
        return bool(tag)

    def _value_end(self) -> bool:
        """Behind a tag that ends the value if another one follows."""
        self._held.append(self._scanner.space())
        tag = self._scanner.next_of(_FOLLOWERS[self._held[0]])
        if tag is None:
            return False
        if tag == "" and not self._scanner.ended:
            return self._is_text()
        self._scanner.back(tag)
        self._end_value()
        if self._held[0] == PARAMETER_END:
            self._state = self._function
        else:
            self._close()
        return True

    def _next_name(self) -> bool:
        """Within a ``<parameter=`` that begins the next parameter if it is one of the function's."""
        assert self._writer is not None
        name, end = self._read_name()
        if end == ">" and self._writer.expects(name):
            self._end_value()
            self._begin_value(name)
            return True
        if end or self._scanner.ended or len(name) > _LONGEST_NAME:
            self._scanner.back(end)
            return self._is_text()
        return False

    def _end_value(self) -> None:
        assert self._writer is not None
        self._writer.end()


def _json_call(text: str) -> tuple[str, str]:
    """Name and arguments, as JSON text, of a call that is a JSON object; no name if it is none."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(call["name"], str) and isinstance(arguments, dict):
            return call["name"], encode(arguments)
    except (ValueError, RecursionError):
        return "", ""
    return "", ""
