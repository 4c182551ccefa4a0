# SPDX-License-Identifier: Apache-2.0
"""Text that matches a regular expression as a whole. The grammar's text is the expression, in the syntax of Rust's
``regex`` crate; a ``^`` in front and a ``$`` at the end say nothing new.
"""

from __future__ import annotations

import re

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.vocabulary import Vocabulary

__all__ = ["grammar"]


def grammar(text: str, vocabulary: Vocabulary) -> str:
    """The library's grammar.

    Args:
        text: The expression.
        vocabulary: The model's tokens.

    Raises:
        RequestError: It is empty.
    """
    from llguidance import LLMatcher

    if not text:
        raise RequestError("The regular expression is empty.")
    text = text.removeprefix("^")
    # A dollar behind an odd number of backslashes is one of the text.
    if re.search(r"(?<!\\)(?:\\\\)*\$\Z", text):
        text = text[:-1]
    return LLMatcher.grammar_from_regex(text)
