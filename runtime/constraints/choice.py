# SPDX-License-Identifier: Apache-2.0
"""Text that is one of some strings. The grammar's text is the list of them, as JSON."""

from __future__ import annotations

import json

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.json_schema import parse_json
from nemo_build.runtime.constraints.vocabulary import Vocabulary

__all__ = ["grammar", "literal"]


def grammar(text: str, vocabulary: Vocabulary) -> str:
    """The library's grammar.

    Args:
        text: A JSON list of strings, none empty.
        vocabulary: The model's tokens.

    Raises:
        RequestError: It is something else.
    """
    from llguidance import LLMatcher

    choices = parse_json(text, "The list of choices")
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
        raise RequestError("The choices must be a list of strings, at least one and none empty.")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, choices)))


def literal(text: str) -> str:
    """A string as a Lark grammar has it."""
    return json.dumps(text, ensure_ascii=False)
