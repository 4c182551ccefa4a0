# SPDX-License-Identifier: Apache-2.0
"""The types of a tool's parameters, from its JSON schema, and texts as JSON values of these types.

The model's form of a call has the text of each argument and nothing about its type, so the schema decides. Where it
allows several types, the first of null, boolean, integer, number, object and array that the text is a value of is
taken, and string otherwise; a member of an enumeration whose text it is goes before that. A text that is of none of
the types stays a string, so that the caller sees what the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

__all__ = ["ANY", "ArgumentType", "argument_types", "encode"]

_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBERISH = re.compile(r"[-0-9.eE+]*")
_LONGEST_SCALAR = 64
"""Longest text that is held back because it may become a number, where a string may stand as well."""

_WORDS = {
    "null": {"null": "null", "None": "null"},
    "boolean": {"true": "true", "True": "true", "false": "false", "False": "false"},
}
"""JSON's words, and Python's for them, as templates write values with Jinja's ``string`` filter."""

encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""JSON text of a value, as it is in arguments."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _parsed(text: str, kind: type) -> str | None:
    """The text itself if it is JSON of a kind: numbers in it keep their digits."""
    try:
        return text if isinstance(json.loads(text, parse_constant=_no_constant), kind) else None
    except (ValueError, RecursionError):
        return None


def _integer(text: str) -> str | None:
    found = _INTEGER.fullmatch(text)
    return found and found.group(1)


_READERS: dict[str, Callable[[str], str | None]] = {
    "null": _WORDS["null"].get,
    "boolean": _WORDS["boolean"].get,
    "integer": _integer,
    "number": lambda text: text if _NUMBER.fullmatch(text) else None,
    "object": lambda text: _parsed(text, dict),
    "array": lambda text: _parsed(text, list),
}
"""Types but string, in the order in which they are tried: a text without white space around it to JSON text."""


@dataclass(frozen=True)
class ArgumentType:
    """What a parameter may be.

    Attributes:
        kinds: JSON types; empty: any.
        members: JSON text of the members of its enumerations, by what a template writes for them.
    """

    kinds: frozenset[str] = frozenset()
    members: Mapping[str, str] = field(default_factory=dict)

    def must_be_string(self, text: str) -> bool:
        """Whether any text that begins so is a string here, so that it need not be held back."""
        if self.kinds == {"string"}:
            return True
        if self.kinds and "string" not in self.kinds:
            return False
        if not (start := text.lstrip()):
            return False
        kinds = self.kinds or _READERS.keys()
        if len(start) <= _LONGEST_SCALAR:
            words = [w for kind in _WORDS.keys() & kinds for w in _WORDS[kind]]
            words += self.members
            if any(word.startswith(start.rstrip()) for word in words):
                return False
            if ({"integer", "number"} & kinds) and _NUMBERISH.fullmatch(start.rstrip()):
                return False
        return not (("object" in kinds and start[0] == "{") or ("array" in kinds and start[0] == "["))

    def convert(self, text: str) -> str:
        """JSON text of the value that a text means."""
        stripped = text.strip()
        if stripped in self.members:
            return self.members[stripped]
        for kind, read in _READERS.items():
            if (not self.kinds or kind in self.kinds) and (value := read(stripped)) is not None:
                return value
        return encode(text)


ANY = ArgumentType()
"""That of a parameter about which nothing is known."""


def argument_types(parameters: object) -> tuple[dict[str, ArgumentType], ArgumentType]:
    """The types of a tool's parameters by name, and that of others, from the ``parameters`` of its description.

    It reads ``type``, ``enum``, ``const``, ``nullable``, ``anyOf``, ``oneOf``, ``allOf``, and ``$ref`` within the
    description. What it cannot read it takes for any type.
    """
    root = parameters if isinstance(parameters, Mapping) else {}
    properties = root.get("properties")
    reader = _Reader(root)
    types = {
        str(name): reader.type_of(schema)
        for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
    }
    return types, reader.type_of(root.get("additionalProperties"))


_Allowed = tuple[frozenset[str], dict[str, str]]
"""JSON types, none for any, and members of enumerations as in :class:`ArgumentType`."""

_ALL: _Allowed = frozenset(), {}


class _Reader:
    """Reads each schema of a description once: references may go round, and many may lead to one."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._read: dict[int, _Allowed | None] = {}

    def type_of(self, schema: object) -> ArgumentType:
        try:
            kinds, members = self._allowed(schema) or _ALL
        except RecursionError:
            return ANY
        return ArgumentType(kinds, {} if kinds == {"string"} else members)  # strings are themselves

    def _allowed(self, schema: object) -> _Allowed | None:
        """What a schema allows; ``None`` for one within itself, which allows nothing more."""
        if not isinstance(schema, Mapping):
            return _ALL
        if id(schema) not in self._read:
            self._read[id(schema)] = None
            kinds, members = _own(schema) or self._union(schema) or self._reference(schema) or _ALL
            if kinds and schema.get("nullable") is True:
                kinds |= {"null"}
            self._read[id(schema)] = kinds, members
        return self._read[id(schema)]

    def _union(self, schema: Mapping[str, Any]) -> _Allowed | None:
        parts = [s for word in ("anyOf", "oneOf") for s in _list(schema.get(word))]
        found = [allowed for part in parts if (allowed := self._allowed(part)) is not None]
        if not all(kinds for kinds, _ in found):
            return None
        members: dict[str, str] = {}
        for _, more in found:
            members |= more
        return (frozenset().union(*(kinds for kinds, _ in found)), members) if found else None

    def _reference(self, schema: Mapping[str, Any]) -> _Allowed | None:
        """What the first of several schemas that all hold says of types."""
        reference = schema.get("$ref")
        parts = _list(schema.get("allOf"))
        parts += [_resolve(reference, self._root)] if isinstance(reference, str) else []
        return next((found for part in parts if (found := self._allowed(part)) and found[0]), None)


def _own(schema: Mapping[str, Any]) -> _Allowed | None:
    """The types that a schema names or that its other words imply, and the members of its enumeration."""
    values = _list(schema.get("enum")) + ([schema["const"]] if "const" in schema else [])
    named = schema.get("type")
    kinds = {kind for kind in ([named] if isinstance(named, str) else _list(named)) if isinstance(kind, str)}
    kinds = kinds or {_kind(value) for value in values}
    kinds = kinds or {kind for word, kind in _IMPLIED.items() if word in schema}
    kinds &= {"string"} | _READERS.keys()
    members = {shown: text for value in values for text in _texts(value) for shown in (str(value), text)}
    return (frozenset(kinds), members) if kinds else None


_IMPLIED = {"properties": "object", "items": "array"}


def _texts(value: object) -> list[str]:
    """JSON text of a member of an enumeration; none if it has none."""
    try:
        return [encode(value)]
    except (TypeError, ValueError, RecursionError):
        return []


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    place: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place if reference.startswith("#") else None


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"
