# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.runtime.speculation.ngram import NgramDrafter


def naive(tokens: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """The definition: search backwards for the longest end, then copy token by token."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        end = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == end:
                whole = list(tokens)
                for i in range(k):
                    whole.append(whole[start + n + i])
                return whole[len(tokens) :]
    return []


sizes = st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda s: {"min_n": s[0], "max_n": s[0] + s[1]})
pieces = st.lists(st.lists(st.integers(0, 2) | st.just(2**32 - 1), max_size=12), max_size=12)


@given(pieces, st.integers(0, 9), sizes)
def test_proposals_by_definition(runs: list[list[int]], k: int, size: dict[str, int]) -> None:
    drafter, tokens = NgramDrafter(**size), []
    for run in runs:
        drafter.extend(run)
        tokens += run
        assert len(drafter) == len(tokens)
        assert drafter.propose(k) == naive(tokens, k, **size)


@given(pieces, sizes)
def test_one_by_one_or_all_at_once(runs: list[list[int]], size: dict[str, int]) -> None:
    tokens = [token for run in runs for token in run]
    whole, stepwise = NgramDrafter(tokens, **size), NgramDrafter(**size)
    for token in tokens:
        stepwise.extend([token])
        stepwise.propose(3)  # changes nothing
    assert whole.propose(5) == stepwise.propose(5)


def test_by_hand() -> None:
    text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]
    assert NgramDrafter(text, min_n=2, max_n=3).propose(4) == [4, 5, 9, 2]  # three tokens beat the later two
    assert NgramDrafter(text, min_n=2, max_n=2).propose(4) == [7, 8, 1, 2]  # the latest
    assert NgramDrafter([*text, 6], min_n=1, max_n=3).propose(4) == []


def test_a_loop_goes_on() -> None:
    assert NgramDrafter([5, 7, 8, 7, 8]).propose(5) == [7, 8, 7, 8, 7]
    assert NgramDrafter([4, 4], min_n=1).propose(3) == [4, 4, 4]
    assert NgramDrafter([4, 4], min_n=2).propose(3) == []


def test_no_tokens_no_drafts() -> None:
    assert NgramDrafter().propose(3) == []
    assert NgramDrafter([1, 1, 1], min_n=1).propose(0) == []


def test_leading_zeros_are_tokens() -> None:
    """Packed keys must not take (0, 5) for the end of a sequence that is only (5)."""
    assert NgramDrafter([5, 6, 0, 5], min_n=1, max_n=3).propose(1) == [6]
    assert NgramDrafter([5, 6, 0, 5], min_n=2, max_n=3).propose(1) == []


def test_a_step_looks_at_its_own_tokens_only() -> None:
    """Every token is written to one place per length, and nothing is searched."""

    class Counting(dict[int, int]):
        writes = 0

        def __setitem__(self, key: int, value: int) -> None:
            Counting.writes += 1
            super().__setitem__(key, value)

    drafter = NgramDrafter(list(range(50)) * 40, min_n=2, max_n=4)
    drafter._tables = [(n, bits, Counting(table)) for n, bits, table in drafter._tables]
    Counting.writes = 0
    drafter.extend([7, 8, 9, 10, 11])
    assert drafter.propose(2) == [12, 13]
    assert Counting.writes == 5 * 3


@pytest.mark.parametrize("size", [{"min_n": 0}, {"min_n": 3, "max_n": 2}])
def test_sizes_out_of_range(size: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="min_n"):
        NgramDrafter(**size)
