# SPDX-License-Identifier: Apache-2.0
"""Drafts without a model: what followed the last tokens when they occurred before.

Known as prompt lookup decoding; it pays where the output repeats the prompt or itself (code, quotations, tables).
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["NgramDrafter"]

_BITS = 32
"""Bits of a token id in a key."""


class NgramDrafter:
    """Proposes the continuation of the latest earlier occurrence of the sequence's end.

    The longest end counts that occurs earlier, of ``max_n`` down to ``min_n`` tokens, and of its occurrences
    the latest. They may overlap the end. Where the continuation reaches the end of the sequence it goes on with
    what it has proposed (a copy as in LZ77), so a loop of any period is proposed at any length.

    For each n there is a dictionary from the n tokens, packed into one exact integer, to the place behind their
    latest occurrence that *has* a next token: a token is added in O(max_n - min_n) and a proposal costs O(k) more,
    however long the sequence is. Memory is about 100 bytes a token and n.

    Tokens once added stay: only accepted ones are to be added.

    Args:
        tokens: The sequence so far.
        min_n: Fewest tokens that must match, >= 1.
        max_n: Most tokens that are looked for, >= ``min_n``.

    Raises:
        ValueError: The sizes are not ``1 <= min_n <= max_n``.
    """

    def __init__(self, tokens: Iterable[int] = (), *, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n = {min_n} and max_n = {max_n} are not 1 <= min_n <= max_n")
        self._tokens: list[int] = []
        self._end = 0  # the last max_n tokens, the newest in the lowest bits
        # Longest first: (n, mask of n tokens, their key -> index of the token after them)
        self._tables: list[tuple[int, int, dict[int, int]]] = [
            (n, (1 << n * _BITS) - 1, {}) for n in range(max_n, min_n - 1, -1)
        ]
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens in the sequence."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens.

        Args:
            tokens: Token ids in [0, 2**32).
        """
        own, end, tables = self._tokens, self._end, self._tables
        mask = tables[0][1]
        for token in tokens:
            place = len(own)
            for n, bits, table in tables:
                if n <= place:
                    table[end & bits] = place
            own.append(token)
            end = ((end << _BITS) | token) & mask
        self._end = end

    def propose(self, k: int) -> list[int]:
        """The k tokens that come next if the sequence repeats itself; none if its end is new.

        Args:
            k: How many, >= 0.
        """
        source = self._find()
        if source is None or k <= 0:
            return []
        found = self._tokens[source : source + k]
        period = len(found)  # if below k: the distance of the copy
        return [found[i % period] for i in range(k)] if period < k else found

    def _find(self) -> int | None:
        """Index of the token after the latest earlier occurrence of the longest end that has one."""
        for n, bits, table in self._tables:
            if n <= len(self._tokens):
                place = table.get(self._end & bits)
                if place is not None:
                    return place
        return None
