# SPDX-License-Identifier: Apache-2.0
"""A speculator that starts behind a restored prefix drafts what one does that has seen all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.speculation.base import MOST_PENDING, Committed, DraftRequest, Speculator, Waiting
from nemo_build.state import StateSpec

from .draft_engine import open_drafter, open_speculator
from .draft_reference import CONFIGS

SLOTS, CONTEXT = 3, 512
RECURRENT = StateSpec("conv.target", "conv", ("slots", 1), "float32")
"""Stands for the target's state: with it, prefixes match only where they were saved."""


@pytest.fixture(scope="module", params=["mtp", "ngram", *CONFIGS])
def opened(request, tmp_path_factory, demo_engine_directory) -> tuple[Speculator, int, int]:
    """A speculator, the width of its features, and token ids that it knows."""
    name = request.param
    if name in CONFIGS:
        directory = tmp_path_factory.mktemp("draft")
        reference, speculator = open_drafter(name, directory, slots=SLOTS, context=CONTEXT)
        return speculator, len(reference.taps) * 48, 90
    width = 192 if name == "mtp" else 0
    # Few ids for lookup, so that it finds something.
    return (
        open_speculator(demo_engine_directory, name, slots=SLOTS, context=CONTEXT),
        width,
        3000 if width else 4,
    )


class Story:
    """Random tokens and features of a sequence, which several slots go through.

    Args:
        speculator: Who is told.
        rng: Where from.
        width: Of the features.
        ids: Token ids are below.
    """

    def __init__(self, speculator: Speculator, rng: np.random.Generator, width: int, ids: int) -> None:
        self.tokens: list[int] = rng.integers(0, ids, CONTEXT).tolist()
        self.fed = dict.fromkeys(range(SLOTS), 0)
        self._features = rng.standard_normal((CONTEXT, width)).astype(np.float32) * 2
        self._speculator = speculator
        self._rng = rng

    def start(self, slot: int, count: int = 0, extra: Any = None) -> None:
        self._speculator.start(slot, self.tokens[:count], extra or {})
        self.fed[slot] = count

    def tell(self, slot: int, count: int) -> None:
        past = self.fed[slot]
        features = self._features[past : past + count].copy()
        row = Committed(slot, past, self.tokens[past : past + count + 1], features)
        self._speculator.observe([row])
        features[:] = np.nan  # the target's output is gone after the step
        self.fed[slot] += count

    def tell_up_to(self, slot: int, end: int) -> None:
        """In steps of any size, now and then with drafts in between."""
        while self.fed[slot] < end:
            sizes = [1, 2, int(self._rng.integers(1, 17)), int(self._rng.integers(1, 300))]
            self.tell(slot, min(int(self._rng.choice(sizes)), end - self.fed[slot]))
            if self._rng.random() < 0.3:
                self.drafts([slot])

    def drafts(
        self, slots: list[int], length: int | None = None
    ) -> list[tuple[list[int], Any, list[NDArray[np.float32]]]]:
        """Drafts, confidence and the predictions behind them."""
        seen: dict[int, list[NDArray[np.float32]]] = {slot: [] for slot in slots}

        def choose(slot: int, row: NDArray[np.float32]) -> int:
            assert np.isfinite(row).all()
            seen[slot].append(row.copy())
            return int(row.argmax())

        length = length or int(self._rng.integers(1, 8))
        requests = [DraftRequest(s, length, lambda row, s=s: choose(s, row)) for s in slots]
        found = self._speculator.propose(requests)
        return [(p.tokens, p.confidence, seen[s]) for p, s in zip(found, slots, strict=True)]


def agree(found: list[tuple[list[int], Any, list[NDArray[np.float32]]]]) -> None:
    tokens, confidence, rows = found[0]
    for other in found[1:]:
        assert other[0] == tokens
        np.testing.assert_allclose(np.array(other[2]), np.array(rows), atol=1e-4)
        if confidence is not None:
            np.testing.assert_allclose(other[1], confidence, atol=1e-5)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))]
)
def test_a_restart_drafts_the_same(opened, seed):
    """Slot 0 is saved at any point, slot 1 starts there, and slot 2 is told of everything without a word of saving."""
    speculator, width, ids = opened
    rng = np.random.default_rng(seed)
    story = Story(speculator, rng, width, ids)
    state = {RECURRENT.name: np.zeros((SLOTS, 1), np.float32), **speculator.state()}
    cache = PrefixCache(
        [RECURRENT, *speculator.states],
        capacity=10**9,
        pending=MOST_PENDING,
        block=8,
        lookahead=speculator.lookahead,
    )
    for slot in (0, 2):
        story.start(slot)
    end = int(rng.integers(2, CONTEXT - 100))
    story.tell_up_to(0, end)
    for _ in range(3):
        committed = max(story.fed[0] - int(rng.integers(0, MOST_PENDING + 1)), 1)
        extra = speculator.save(0, committed)
        assert cache.store(story.tokens, state, 0, committed, extra=extra)
        for buffer in speculator.state().values():
            buffer[1] = np.nan
        with cache.match(story.tokens[: committed + 1]) as match:
            assert match.length == committed
            story.start(1, committed, cache.restore(match, state, 1))
        for slot in (1, 2):
            story.tell_up_to(slot, story.fed[0])
        # A slot that starts where the others are knows nothing of the token that follows.
        more = int(rng.integers(story.fed[0] == committed, 20))
        for slot in range(SLOTS) if more else ():
            story.tell(slot, more)
        agree(story.drafts([0, 1, 2]))
        story.tell(0, int(rng.integers(1, 9)))
        for slot in (1, 2):
            story.tell_up_to(slot, story.fed[0])
        agree(story.drafts([2, 0, 1]))
        speculator.release(1)


def test_proposing_again_gives_the_same(opened):
    speculator, width, ids = opened
    story = Story(speculator, np.random.default_rng(0), width, ids)
    story.start(0)
    story.tell(0, 30)
    for length in (1, 5, 3):
        agree([*story.drafts([0], length), *story.drafts([0], length)])


def test_a_prefix_that_was_not_saved_at_its_end(opened):
    """Without what saving returns, drafts may be others, but there are some."""
    speculator, width, ids = opened
    story = Story(speculator, np.random.default_rng(1), width, ids)
    story.start(0)
    story.tell(0, 20)
    speculator.save(0, 20)
    story.start(0, 10)
    story.tell(0, 3)
    assert len(story.drafts([0])) == 1


@pytest.mark.parametrize("seed", range(20))
def test_waiting_positions_and_the_last_ones_are_kept(seed):
    """And not much more."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((2000, 3)).astype(np.float32)
    past = int(rng.integers(0, 3))
    waiting = Waiting(past - 1, features[past - 1 : past]) if past else Waiting(0)
    start = taken = waiting.taken
    while past < 1900:
        n = int(rng.choice([1, 2, 5, 90]))
        row = Committed(0, past, list(range(past, past + n + 1)), features[past : past + n])
        past += n
        if n == 90:
            keep = int(rng.integers(0, 2))
            first, tokens, found = waiting.drain(row, keep)
            end = past - keep
        else:
            waiting.add(row)
            end = int(rng.integers(taken, past + 1))
            first, tokens, found = waiting.take(end)
        assert first == taken
        assert tokens == list(range(taken + 1, end + 1))
        np.testing.assert_array_equal(found, features[taken:end])
        taken = end
        for position in range(max(start, min(taken, past - MOST_PENDING - 1)), past):
            np.testing.assert_array_equal(waiting.at(position), features[position])
        assert past - waiting.first < 300


def test_positions_that_are_not_kept_cannot_be_saved(demo_engine_directory):
    speculator = open_speculator(demo_engine_directory, "mtp", slots=SLOTS, context=CONTEXT)
    story = Story(speculator, np.random.default_rng(2), 192, 3000)
    story.start(0)
    story.tell_up_to(0, 400)
    story.drafts([0])
    with pytest.raises(ValueError, match="which are kept"):
        speculator.save(0, 100)
    with pytest.raises(ValueError, match="which are kept"):
        speculator.save(0, 401)
    assert speculator.save(0, 0) == {}
