# SPDX-License-Identifier: Apache-2.0
r"""Tool calls in the model's XML form. The grammar's text is JSON with ``tools``, ``choice`` and ``parallel``.

``tools`` are OpenAI's. ``choice`` is ``required`` (at least one call), ``auto`` (text, then perhaps calls) or a name
(one call of that function). ``parallel`` false: at most one call. ``content``, a JSON schema, is for ``auto``: then
there are calls, or else JSON of that schema. A call is ::

    <tool_call>
    <function=NAME>
    <parameter=ARG>
    VALUE
    </parameter>
    </function>
    </tool_call>

Parameters come in the order of the schema, those that are required always, each at most once. A parameter that may be a
string is any text without ``</parameter>`` (its pattern and length are not looked at), others are JSON by their schema,
enumerations and constants literal. A function whose schema names no properties but allows some takes any parameters.
JSON values may hold ``</parameter>`` in a string, which no reader of calls can tell from the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.choice import literal
from nemo_build.runtime.constraints.json_schema import EXACTLY, check_multiples, parse_json
from nemo_build.runtime.constraints.vocabulary import TOOL_CALL, TOOL_CALL_END, Vocabulary

__all__ = ["grammar"]

_CLOSE = "</parameter>"

_ANNOTATIONS = {"title", "description", "$schema", "$id", "$comment", "default", "examples", "type", "strict"}
_SCOPES = ("$defs", "definitions")
_UNDERSTOOD = {"properties", "required", "additionalProperties", *_SCOPES, *_ANNOTATIONS}
"""Members of the schema of a function's parameters that are honoured, or say nothing."""

_MOST_REFERENCES = 16
"""How far references are followed that lead to references; more is a circle."""

_MOST_WORK = 4 << 20
"""Characters of JSON schemas in the library's grammar, where each parameter has the definitions anew, and steps towards
what parameters refer to. Usual tools have thousands."""

_TERMINALS = r"""
RAW: (/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/) "\n</parameter>\n"
NAME: /[^>\n]+/
"""


def grammar(text: str, vocabulary: Vocabulary) -> str:
    """The library's grammar.

    Args:
        text: The tools and the choice, as above.
        vocabulary: The model's tokens.

    Raises:
        RequestError: Listing what is wrong with the tools.
    """
    from llguidance import LLMatcher

    given = parse_json(text, "The description of the tools")
    problems: list[str] = []
    if not isinstance(given, Mapping):
        raise RequestError("The description of the tools must be a JSON object.")
    check_multiples(given)
    functions = _functions(given.get("tools"), problems)
    choice, parallel = given.get("choice", "auto"), given.get("parallel", True)
    named = choice not in ("auto", "required")
    if named and not (isinstance(choice, str) and choice in functions):
        problems.append(f"there is no function {choice!r} to choose")
    if not isinstance(parallel, bool):
        problems.append(f"parallel must be true or false, got {parallel!r}")
    content = given.get("content")
    if not (content is None or isinstance(content, Mapping)):
        problems.append(f"content must be a JSON schema, got {content!r}")
    rules: list[str] = []
    work = _Work()
    for i, (name, schema) in enumerate(functions.items()):
        own = _function(i, name, schema, problems, work)
        rules += own if not named or name == choice else []
    if problems:
        raise RequestError("The tools cannot be used:", problems)
    heads = [rule.partition(":")[0] for rule in rules if rule.startswith("function_")]
    begin, end = (_mark(mark, vocabulary) for mark in (TOOL_CALL, TOOL_CALL_END))
    lines = [
        _start(begin, auto=choice == "auto", many=parallel and not named, content=content),
        f'rest: "\\n<function=" ({" | ".join(heads)}) "</function>\\n" {end}',
        *rules,
        _TERMINALS,
    ]
    return LLMatcher.grammar_from_lark("\n".join(lines))


class _Work:
    """How much work the schemas of one grammar may make."""

    def __init__(self) -> None:
        self._left = _MOST_WORK

    def add(self, count: int) -> None:
        """So much more was done. Raises RequestError if it is too much."""
        self._left -= count
        if self._left < 0:
            raise RequestError(
                "The tools cannot be used: their parameters refer to too much.",
                hint="Definitions count again for each parameter that refers to one: make them smaller or fewer.",
            )


def _mark(mark: str, vocabulary: Vocabulary) -> str:
    """A mark of the chat format: its token, if it has one, or its text."""
    token = vocabulary.single(mark)
    return literal(mark) if token is None else f"<[{token}]>"


def _start(begin: str, *, auto: bool, many: bool, content: Mapping[str, Any] | None) -> str:
    """Rules for what comes before, between and behind calls."""
    more = f"(/\\n?/ {begin} rest)*" if many else ""
    calls = f"rest {more} /\\n?/"
    if not auto:
        return f"start: /\\n{{0,2}}/ {begin} {calls}"
    if content is not None:
        return f"start: answer | /\\n{{0,2}}/ {begin} {calls}\nanswer: {_inline(content)}"
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){TOOL_CALL}(?s:.*)/\n"
    if begin.startswith("<["):
        return f"{text}start: TEXT ({begin} {calls})?"
    # The text and the mark behind it are one terminal, or they could not be told apart while they come.
    return f"{text}UP_TO_CALL: TEXT {begin}\nstart: TEXT | UP_TO_CALL {calls}"


def _functions(tools: object, problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the functions' parameters, by name."""
    found: dict[str, Mapping[str, Any]] = {}
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        problems.append("there are no tools")
        return found
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not (isinstance(name, str) and _is_name(name)):
            problems.append(f"tool {i} has no usable name: {name!r}")
            continue
        if name in found:
            problems.append(f"there are two functions {name!r}")
        schema = function.get("parameters")
        found[name] = {"additionalProperties": False} if schema is None else schema
    return found


def _is_name(name: str) -> bool:
    """Whether a name can stand in a tag."""
    return name != "" and not set(name) & set(">\n")


def _function(number: int, name: str, schema: object, problems: list[str], work: _Work) -> list[str]:
    """The rules of one function; the first is that of its name and parameters."""
    where = f"function {name!r}"
    if not isinstance(schema, Mapping):
        problems.append(f"{where}: its parameters must be a JSON schema, got {schema!r}")
        return []
    unknown = sorted(key for key in schema if key not in _UNDERSTOOD and not key.startswith("x-"))
    if unknown or schema.get("type", "object") != "object":
        told = [*unknown, *([f"type {schema['type']!r}"] if schema.get("type", "object") != "object" else [])]
        problems.append(f"{where}: its parameters have {', '.join(told)}, which is not supported there")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(isinstance(key, str) for key in required)
    ):
        problems.append(f"{where}: properties must be an object, and required a list of names")
        return []
    properties = dict(properties) | {key: {} for key in required if key not in properties}
    required = set(required)
    problems += [f"{where}: {key!r} is no name of a parameter" for key in properties if not _is_name(key)]
    head = f"function_{number}"
    if not properties and schema.get("additionalProperties", True) is not False:
        return [f'{head}: {literal(name + ">" + chr(10))} ("<parameter=" NAME ">\\n" RAW)*']
    parts, rules = [literal(f"{name}>\n")], []
    for i, (key, value) in enumerate(properties.items()):
        rule = f"parameter_{number}_{i}"
        body = _value(value, schema, f"{where}, parameter {key!r}", problems, work)
        rules.append(f"{rule}: {literal(f'<parameter={key}>' + chr(10))} {body}")
        parts.append(rule if key in required else f"{rule}?")
    return [f"{head}: {' '.join(parts)}", *rules]


def _value(schema: object, root: Mapping[str, Any], where: str, problems: list[str], work: _Work) -> str:
    """A parameter's value and the end of it."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        problems.append(f"{where}: its schema must be an object, got {schema!r}")
        return "RAW"
    resolved = _resolved(schema, root, work)
    literals = [resolved["const"]] if "const" in resolved else resolved.get("enum")
    if isinstance(literals, list) and literals:
        texts = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in literals]
        problems += [f"{where}: {t!r} cannot be told from its end" for t in texts if _CLOSE in t]
        return f"({' | '.join(literal(t + chr(10) + _CLOSE + chr(10)) for t in texts)})"
    if _may_be_string(resolved, root, work):
        return "RAW"
    body = _inline(schema)
    if '"$ref"' in body:
        body = _inline({**{scope: root[scope] for scope in _SCOPES if scope in root}, **schema})
    work.add(len(body))
    return f'{body} "\\n{_CLOSE}\\n"'


def _inline(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, within a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': dict(EXACTLY)}, ensure_ascii=False)}"


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any], work: _Work) -> Mapping[str, Any]:
    """A schema, or what it refers to; where that is nothing, the library says so."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref")
        found: Any = root
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        work.add(len(reference))
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        schema = found
    return schema


def _may_be_string(schema: Mapping[str, Any], root: Mapping[str, Any], work: _Work) -> bool:
    """Whether a value may be a string, so that it stands there as it is."""
    waiting, seen = [schema], {id(schema)}
    while waiting:
        found = waiting.pop()
        if "$ref" in found:
            continue
        members = next((found[key] for key in ("anyOf", "oneOf") if isinstance(found.get(key), list)), None)
        if members is None:
            if _is_string(found):
                return True
            continue
        for member in members:
            work.add(1)
            alternative = _resolved(member, root, work) if isinstance(member, Mapping) else None
            if alternative is not None and id(alternative) not in seen:  # each once, whoever refers to it
                seen.add(id(alternative))
                waiting.append(alternative)
    return False


def _is_string(schema: Mapping[str, Any]) -> bool:
    """Whether a schema without alternatives has strings."""
    kind = schema.get("type")
    if kind is None:
        return not ({"properties", "items", "allOf"} & schema.keys())
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
