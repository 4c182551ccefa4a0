# SPDX-License-Identifier: Apache-2.0
"""Tokens to text while they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Protocol

__all__ = ["IncrementalDetokenizer", "TokenTable"]


class TokenTable(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of the control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""


class IncrementalDetokenizer:
    """Turns a stream of tokens into text, never showing a character before all its bytes are there.

    A token of a byte-level vocabulary may hold any part of a UTF-8 sequence. The pieces returned by
    :meth:`push` and :meth:`finish`, joined, equal ``b"".join(bytes of all tokens).decode("utf-8",
    "replace")``; no piece is ever taken back.

    Args:
        table: The tokenizer.
        skip_special_tokens: Leave control tokens out, as if they had not been pushed.
    """

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = table.token_bytes
        self._skipped = frozenset(table.special_ids if skip_special_tokens else ())
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is complete with it, possibly none."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """End of the tokens: an incomplete character becomes U+FFFD. The next push starts a new text."""
        return self._decoder.decode(b"", final=True)
