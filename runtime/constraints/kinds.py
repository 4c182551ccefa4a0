# SPDX-License-Identifier: Apache-2.0
"""The kinds of grammars, by the names that requests have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_build.runtime.constraints import choice, json_object, json_schema, lark, regex, tools
from nemo_build.runtime.constraints.vocabulary import Vocabulary

__all__ = ["KINDS"]

KINDS: Mapping[str, Callable[[str, Vocabulary], str]] = {
    "json_schema": json_schema.grammar,
    "json_object": json_object.grammar,
    "regex": regex.grammar,
    "lark": lark.grammar,
    "choice": choice.grammar,
    "tools": tools.grammar,
}
"""What makes the library's grammar of a request's text, and raises RequestError where it cannot."""
