# SPDX-License-Identifier: Apache-2.0
"""What constraints need to know of a tokenizer."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from nemo_build.errors import UserError
from nemo_build.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = ["THINK_END", "TOOL_CALL", "TOOL_CALL_END", "Vocabulary"]

THINK_END = "</think>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


class Vocabulary:
    """The tokens of a model as bytes, and the marks of its chat format. Any thread may use it.

    Args:
        tokenizer: The tokenizer.
        size: Width V of the model's logits; ids past the tokenizer's stand for nothing and are never allowed.
        eos_ids: Ids that end a text, at least one.

    Attributes:
        tokenizer: As given, like `size` and `eos_ids`.
        known: Ids below this may stand for something.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.size, self.eos_ids = tokenizer, size, tuple(eos_ids)
        self.known = min(size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._found: dict[tuple[bytes, bytes], tuple[list[int], list[int]]] = {}

    def ids_of(self, mark: str) -> list[int]:
        """The tokens that a mark is written with."""
        return self.tokenizer.encode(mark)

    def single(self, mark: str) -> int | None:
        """The token that stands for a mark, if one does."""
        ids = self.ids_of(mark)
        return ids[0] if len(ids) == 1 else None

    def completing(self, mark: bytes, begun: bytes) -> tuple[list[int], list[int]]:
        """The tokens that complete a mark of which the text ends with a part.

        Args:
            mark: The mark.
            begun: What of it is there, perhaps nothing.

        Returns:
            Those that end with it, and those that go on behind it.
        """
        key = mark, begun
        if key not in self._found:
            ends: list[int] = []
            beyond: list[int] = []
            for token in range(self.known):
                data = self.tokenizer.token_bytes(token)
                if begun + data == mark or (mark in data and data.endswith(mark)):
                    ends.append(token)
                elif data and mark in begun + data:
                    beyond.append(token)
            self._found[key] = ends, beyond
        return self._found[key]

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that stand for themselves, and not for their text: no grammar of text allows them."""
        return self.tokenizer.added_ids | frozenset(self.eos_ids)

    def for_grammars(self) -> llguidance.LLTokenizer:
        """The tokenizer as the library of grammars wants it; made at the first call.

        Raises:
            UserError: The library is not installed.
        """
        with self._lock:
            return self._for_grammars

    @cached_property
    def _for_grammars(self) -> llguidance.LLTokenizer:
        try:
            import llguidance
        except ImportError as error:
            raise UserError(
                "Grammars need the library llguidance.", hint="Install it: pip install 'nemo-build[serve]'"
            ) from error
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Wrapped(self)))


class _Wrapped:
    """The attributes and the call that llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        special = vocabulary._special
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = vocabulary.eos_ids[0], tokenizer.bos_id
        self.special_token_ids = sorted(special)
        # A special token is told from its text by a byte that no UTF-8 text has.
        self.tokens = [
            (b"\xff" if i in special else b"") + tokenizer.token_bytes(i) for i in range(vocabulary.known)
        ]

        marks = "|".join(re.escape(tokenizer.token_bytes(i).decode()) for i in sorted(special))
        self._marks = re.compile(f"(?=(?:{marks}))") if marks else None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text in which the name of a special token is text as well."""
        given, ids, start = text.decode(), [], 0
        for mark in self._marks.finditer(given) if self._marks else ():
            # Cut behind its first character, so that the tokenizer does not see it.
            ids += self._tokenizer.encode(given[start : mark.start() + 1])
            start = mark.start() + 1
        return ids + self._tokenizer.encode(given[start:])
