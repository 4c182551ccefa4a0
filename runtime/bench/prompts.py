# SPDX-License-Identifier: Apache-2.0
"""Prompts of a measurement: texts by category, and the token ids that are made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.runtime.engine import Engine

DEFAULT_PROMPTS = Path(__file__).parent / "prompts.jsonl"
"""Texts of ours: code, prose, dialogue, structured data, repetition."""

UNCATEGORIZED = "other"
"""Category of prompts that name none."""

_KINDS = ("text", "tokens", "messages")
_JOIN = "\n\n"  # between the texts that are put together for a long prompt
_MOST_PROBLEMS = 10


@dataclass(frozen=True)
class Prompt:
    """A prompt as the file has it.

    Attributes:
        category: What kind of text it is.
        kind: ``text``, ``tokens`` or ``messages``.
        content: A string, token ids, or OpenAI-style messages, by kind.
    """

    category: str
    kind: str
    content: Any


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as the engine gets it.

    Attributes:
        category: What kind of text it is.
        tokens: Its token ids.
        wrapped: Whether its category has too little text for the length asked for, so that some comes twice.
    """

    category: str
    tokens: tuple[int, ...]
    wrapped: bool = False


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSON Lines file: in each line ``text``, ``tokens`` or ``messages``, and perhaps a ``category``.

    Raises:
        RequestError: The file cannot be read or has no prompts, or lines are wrong; the first ones are listed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"The prompts {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompts {path} are not UTF-8: byte {error.start}.") from error
    prompts, problems = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _parse(line)
            if isinstance(prompt, str):
                problems.append(f"line {number}: {prompt}")
            else:
                prompts.append(prompt)
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        shown = problems[:_MOST_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        hint = 'A line is a JSON object: {"text": "…", "category": "code"}, or "tokens" or "messages" for "text".'
        raise RequestError(f"The prompts {path} cannot be used:", shown, hint)
    if not prompts:
        raise RequestError(f"The prompts {path} hold none.")
    return prompts


def _parse(line: str) -> Prompt | str:
    """A line's prompt, or what is wrong with it."""
    try:
        data = json.loads(line)
    except ValueError as error:
        return f"it is not JSON: {error}"
    if not isinstance(data, dict):
        return "it is no JSON object"
    kinds = [k for k in _KINDS if k in data]
    if len(kinds) != 1:
        return f"it must have one of {', '.join(_KINDS)}, and has {' and '.join(kinds) or 'none'}"
    if unknown := sorted(set(data) - {*_KINDS, "category"}):
        return f"it has {', '.join(unknown)}, which mean nothing here"
    category = data.get("category", UNCATEGORIZED)
    if not isinstance(category, str) or not category:
        return f"category must be a name, and is {category!r}"
    kind, content = kinds[0], data[kinds[0]]
    if not content or not _is_of_kind(kind, content):
        wanted = {"text": "a text", "tokens": "a list of token ids", "messages": "a list of messages"}[kind]
        return f"{kind} must be {wanted} that is not empty"
    return Prompt(category, kind, content)


def _is_of_kind(kind: str, content: object) -> bool:
    if kind == "text":
        return isinstance(content, str)
    if not isinstance(content, list):
        return False
    if kind == "tokens":
        return all(isinstance(t, int) and not isinstance(t, bool) for t in content)
    return all(isinstance(m, dict) and "role" in m for m in content)


def tokenize(prompts: Sequence[Prompt], engine: Engine, length: int | None) -> list[TokenPrompt]:
    """Turn prompts into token ids, the categories taking turns.

    Args:
        prompts: At least one.
        engine: Whose tokenizer and chat template to use.
        length: Tokens of each, >= 1: a longer prompt is cut, a shorter one goes on with the next ones of its category.
            ``None`` takes each as it is.

    Raises:
        RequestError: Conversations would have to be cut, or the chat template refuses one.
    """
    if length is not None and any(p.kind == "messages" for p in prompts):
        raise RequestError(
            "Prompts that are messages cannot be brought to a length.", hint="Leave --input-len out."
        )
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    made = [[_token_prompt(group, i, engine, length) for i in range(len(group))] for group in groups.values()]
    return [p for p in chain.from_iterable(zip_longest(*made)) if p is not None]


def _token_prompt(group: Sequence[Prompt], index: int, engine: Engine, length: int | None) -> TokenPrompt:
    """The prompt at `index` of a category's."""
    prompt = group[index]
    if prompt.kind == "messages":
        return TokenPrompt(prompt.category, tuple(engine.chat_prompt(prompt.content)))
    if length is None:
        return TokenPrompt(prompt.category, _encode([prompt], engine))
    alike = [p for p in [*group[index:], *group[:index]] if p.kind == prompt.kind]
    parts: list[Prompt] = []
    tokens: tuple[int, ...] = ()
    while len(tokens) < length:
        parts.append(alike[len(parts) % len(alike)])
        tokens = _encode(parts, engine)
        if len(tokens) < length and len(parts) >= len(alike):
            # One round through the category is known: what is still wanting is so many rounds more.
            parts *= length // max(len(tokens), 1) + 1
            tokens = _encode(parts, engine)
    return TokenPrompt(prompt.category, tokens[:length], wrapped=len(parts) > len(alike))


def _encode(parts: Sequence[Prompt], engine: Engine) -> tuple[int, ...]:
    if parts[0].kind == "tokens":
        return tuple(t for p in parts for t in p.content)
    return tuple(engine.tokenizer.encode(_JOIN.join(p.content for p in parts), add_special_tokens=True))
