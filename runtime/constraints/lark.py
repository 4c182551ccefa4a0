# SPDX-License-Identifier: Apache-2.0
"""Text of a context-free grammar. The grammar's text is that: in llguidance's dialect of Lark, or in llama.cpp's GBNF,
which is told by its ``::=``.
"""

from __future__ import annotations

import json
import re

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.json_schema import check_multiples
from nemo_build.runtime.constraints.vocabulary import Vocabulary

__all__ = ["grammar"]

_SCHEMA = re.compile(r"%json\s*")


def grammar(text: str, vocabulary: Vocabulary) -> str:
    """The library's grammar.

    Args:
        text: The grammar.
        vocabulary: The model's tokens.

    Raises:
        RequestError: It is empty, GBNF with a mistake, or has a schema behind ``%json`` that cannot be used.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not text.strip():
        raise RequestError("The grammar is empty.")
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the library has no error of its own
            raise RequestError(f"The grammar is no GBNF: {error}") from error
    check_multiples([_schema(text, found.end()) for found in _SCHEMA.finditer(text)])
    return LLMatcher.grammar_from_lark(text)


def _schema(text: str, start: int) -> object:
    """The JSON that begins there."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"What follows %json is no JSON: {error}") from None
