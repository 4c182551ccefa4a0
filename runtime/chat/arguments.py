# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call as JSON text, written while they come."""

from __future__ import annotations

from collections.abc import Callable

from nemo_build.runtime.chat.argument_types import ANY, ArgumentType, argument_types, encode

__all__ = ["ArgumentWriter", "Signature"]

_DECIDED = 128
"""Characters of a value after which more of it does not change what :meth:`ArgumentType.must_be_string` says."""


class Signature:
    """What is known of a function: the types of its parameters."""

    def __init__(self, parameters: object = None) -> None:
        self._types, self._others = argument_types(parameters)

    def has(self, parameter: str) -> bool:
        """Whether a parameter is declared; where none is, any may be."""
        return parameter in self._types or not self._types

    def type_of(self, parameter: str) -> ArgumentType:
        """That of a declared parameter, or else what the description says of others."""
        return self._types.get(parameter, self._others)


class ArgumentWriter:
    """Writes the JSON object of one call.

    Text of a string goes out as it comes. Text that may be another value is held back to its end. Of two parameters of
    one name the first counts, for its text may have been sent already.

    Args:
        signature: Of the function that is called.
        send: Gets the pieces of JSON text, none empty.
    """

    def __init__(self, signature: Signature, send: Callable[[str], None]) -> None:
        self._given: set[str] = set()
        self._signature = signature
        self._send = send
        self._type = ANY
        self._held: list[str] | None = None  # None: the text is a string, and sent as it comes
        self._head = ""
        self._is_repeated = False

    def expects(self, name: str) -> bool:
        """Whether the function has a parameter that was not given yet."""
        return self._signature.has(name) and name not in self._given

    def begin(self, name: str) -> None:
        """Begin a parameter."""
        self._is_repeated = name in self._given
        if self._is_repeated:
            return
        self._send(f"{', ' if self._given else '{'}{encode(name)}: ")
        self._given.add(name)
        self._type = self._signature.type_of(name)
        self._held, self._head = [], ""
        if self._type.must_be_string(""):
            self._held = None
            self._send('"')

    def text(self, text: str) -> None:
        """More of the parameter's text."""
        if self._is_repeated or not text:
            return
        if self._held is None:
            self._send(encode(text)[1:-1])
            return
        self._held.append(text)
        if len(self._head) < _DECIDED:
            self._head = (self._head + text).lstrip()[:_DECIDED]
            if self._type.must_be_string(self._head):
                held, self._held = "".join(self._held), None
                self._send(encode(held)[:-1])

    def end(self) -> None:
        """End the parameter."""
        if self._is_repeated:
            return
        self._send('"' if self._held is None else self._type.convert("".join(self._held)))

    def close(self) -> None:
        """End the object."""
        self._send("}" if self._given else "{}")
