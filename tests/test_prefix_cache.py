# SPDX-License-Identifier: Apache-2.0
"""The prefix cache on fake state: any order of calls against a naive model, and single behaviours."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nemo_build.runtime.prefix_cache import Match, PrefixCache
from nemo_build.state import StateSpec

RECURRENT = [
    StateSpec("conv.0", "conv", ("slots", "3+pending", 2), "float32"),
    StateSpec("ssm.0", "ssm", ("slots", 2, 3), "float32"),
    StateSpec("ssm_pending.0", "ssm_pending", ("slots", "pending", 4), "float32"),
]
ATTENTION = [
    StateSpec("key.1", "key", ("slots", 2, "context", 3), "float32"),
    StateSpec("value.1", "value", ("slots", 2, "context", 3), "float16"),
    StateSpec("key.mtp", "key", ("slots", 1, "context", 2), "float32"),
]
KINDS = {"hybrid": [*RECURRENT, *ATTENTION], "attention": ATTENTION, "recurrent": RECURRENT}
SLOTS, CONTEXT, PENDING = 3, 20, 2
SNAPSHOT = 3 * 2 * 4 + 2 * 3 * 4
TOKEN = 4


# --- fake state, whose every number tells which tokens of whom made it ----------------------------------------


def lookahead(states: Sequence[StateSpec]) -> dict[str, int]:
    return {s.name: 1 for s in states if s.name == "key.mtp"}


def blank(states: Sequence[StateSpec]) -> dict[str, np.ndarray]:
    sizes = {"slots": SLOTS, "context": CONTEXT, "pending": PENDING}
    return {s.name: np.full(s.resolve(sizes), np.nan, s.dtype) for s in states}


@functools.cache
def content(name: str, salt: str | None, tokens: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    start = zlib.crc32(repr((name, salt, tokens)).encode()) % 1000
    return np.arange(start, start + np.prod(shape)).reshape(shape)


def slot_after(states: Sequence[StateSpec], tokens: Sequence[int], salt: str | None) -> dict[str, np.ndarray]:
    """What one slot holds once `tokens` are committed; NaN where nothing is to be relied on."""
    slot = {}
    for spec, buffer in zip(states, blank(states).values(), strict=True):
        mine = slot[spec.name] = buffer[0]
        if "context" in spec.shape:
            ahead = lookahead(states).get(spec.name, 0)
            for p in range(len(tokens) - ahead):
                depends = tuple(tokens[: p + 1 + ahead])
                mine[:, p] = content(spec.name, salt, depends, mine[:, p].shape)
        elif spec.kind == "conv":
            mine[:3] = content(spec.name, salt, tuple(tokens), (3, 2))
        elif spec.kind == "ssm":
            mine[:] = content(spec.name, salt, tuple(tokens), mine.shape)
    return slot


def committed_state(
    states: Sequence[StateSpec], slot: int, tokens: Sequence[int], salt: str | None
) -> dict[str, np.ndarray]:
    state = blank(states)
    for name, array in slot_after(states, tokens, salt).items():
        state[name][slot] = array
    return state


class Fake:
    """A cache and the fake state it is fed with."""

    def __init__(self, kind: str = "hybrid", *, capacity: int = 10**6, block: int = 4, every: int = 0):
        self.states = KINDS[kind]
        self.cache = PrefixCache(
            self.states,
            capacity=capacity,
            pending=PENDING,
            block=block,
            snapshot_every=every,
            lookahead=lookahead(self.states),
        )

    def store(
        self, tokens: Sequence[int], committed: int | None = None, salt: str | None = None, **kwargs: Any
    ) -> bool:
        committed = len(tokens) if committed is None else committed
        state = committed_state(self.states, 1, tokens[:committed], salt)
        return self.cache.store(tokens, state, 1, committed, salt, **kwargs)

    def length(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """What matches; checked bit by bit."""
        with self.cache.match(tokens, salt) as match:
            self.check(match, tokens, salt)
            return match.length

    def check(self, match: Match, tokens: Sequence[int], salt: str | None) -> Any:
        """Restore: exactly the prefix's state, in that slot alone."""
        state = blank(self.states)
        extra = self.cache.restore(match, state, 2)
        want = committed_state(self.states, 2, tokens[: match.length], salt)
        for name, array in state.items():
            np.testing.assert_array_equal(array, want[name] if match.length else np.nan, err_msg=name)
        return extra


# --- any order of calls ---------------------------------------------------------------------------------------

Entry = tuple[str | None, tuple[int, ...]]


class CacheMachine(RuleBasedStateMachine):
    """Against a list of prefixes, the one used last at its end, whose bytes are counted anew each time."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        block=st.integers(1, 3),
        every=st.integers(0, 3),
        capacity=st.sampled_from([0, 120, 250, 400, 700, 10**6]),
    )
    def start(self, kind: str, block: int, every: int, capacity: int) -> None:
        self.fake = Fake(kind, capacity=capacity, block=block, every=every)
        self.recurrent = kind != "attention"
        self.block, self.every, self.capacity = block, every * block, capacity
        self.row_bytes = {"key.1": 24, "value.1": 12, "key.mtp": 8} if kind != "recurrent" else {}
        self.entries: list[Entry] = []
        self.extras: dict[Entry, np.ndarray] = {}
        self.pins: Counter[Entry] = Counter()
        self.held: list[tuple[Match, Entry, np.ndarray | None, Counter[Entry]]] = []
        self.queries = self.hits = self.refused = self.saved = self.stores = self.cleared = 0

    tokens = st.builds(  # prompts that have much in common
        lambda line, n, tail: [*line[:n], *tail],
        st.sampled_from([[0] * 9, [0, 0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0, 1, 0, 1]]),
        st.integers(0, 9),
        st.lists(st.integers(0, 1), max_size=2),
    )
    salts = st.sampled_from([None, None, None, "a"])

    # the model

    def ends(self, n: int) -> list[int]:
        return sorted({*range(self.block, n + 1, self.block), n} - {0})

    def blocks(self, entries: Sequence[Entry]) -> set[Entry]:
        return {(salt, t[:n]) for salt, t in entries for n in self.ends(len(t))}

    def bytes_of_rows(self, entries: Sequence[Entry]) -> int:
        total = 0
        for _, t in self.blocks(entries):
            start = (len(t) - 1) // self.block * self.block
            total += TOKEN * (len(t) - start)
            for name, size in self.row_bytes.items():
                ahead = name == "key.mtp"
                total += size * (max(len(t) - ahead, 0) - max(start - ahead, 0))
        return total

    def bytes_of_snapshots(self) -> int:
        extras = sum(self.extras[e].nbytes for e in self.entries if e in self.extras)
        return extras + SNAPSHOT * self.recurrent * len(self.entries)

    def touch(self, entry: Entry) -> None:
        salt, t = entry
        used = [entry] if self.recurrent else [(salt, t[:n]) for n in self.ends(len(t))[::-1]]
        self.entries = [e for e in self.entries if e not in used] + used

    def evictable(self, entry: Entry, new: Entry) -> bool:
        if self.pins[entry] or self.recurrent:
            return not self.pins[entry]
        (salt, t), full = entry, len(entry[1]) % self.block == 0
        followed = any(s == salt and u[: len(t)] == t and len(u) > len(t) for s, u in self.entries)
        on_the_way = salt == new[0] and new[1][: len(t)] == t
        return not (full and (followed or on_the_way))

    def room(self, new: Entry, size: int) -> bool:
        if self.bytes_of_rows([new]) + size > self.capacity:
            return False
        while self.bytes_of_rows([*self.entries, new]) + self.bytes_of_snapshots() + size > self.capacity:
            victim = next((e for e in self.entries if self.evictable(e, new)), None)
            if victim is None:
                return False
            self.entries.remove(victim)
        return True

    # the calls

    @rule(tokens=tokens, cut=st.integers(0, 3), salt=salts, extra=st.booleans())
    def store(self, tokens: list[int], cut: int, salt: str | None, extra: bool) -> None:
        committed = max(len(tokens) - cut, 0)
        new: Entry = (salt, tuple(tokens[:committed]))
        hidden = content("hidden", salt, new[1], (3,)).astype(np.float32)
        kwargs = {"extra": {"hidden": hidden}} if extra else {}
        got = self.fake.store(tokens, committed, salt, **kwargs)
        known = new in self.entries
        want = committed > 0 and (known or self.room(new, SNAPSHOT * self.recurrent + hidden.nbytes * extra))
        assert got == want
        self.refused += committed > 0 and not want
        self.stores += want and not known
        if want and not known:
            for entry in [new] if self.recurrent else self.blocks([new]):
                if entry not in self.entries:
                    self.entries.append(entry)
                    self.extras.pop(entry, None)
            if extra:
                self.extras[new] = hidden
        if want:
            self.touch(new)

    @rule(tokens=tokens, salt=salts)
    def match(self, tokens: list[int], salt: str | None) -> None:
        match = self.fake.cache.match(tokens, salt)
        found = [
            t for s, t in self.entries if s == salt and t == tuple(tokens[: len(t)]) and len(t) < len(tokens)
        ]
        want = max(found, key=len, default=())
        assert match.length == len(want)
        self.queries += 1
        if match.length:
            self.hits += 1
            self.touch((salt, want))
            self.pins[(salt, want)] += 1
            self.held.append((match, (salt, want), self.extras.get((salt, want)), self.pins))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.held:
            match, (salt, tokens), extra, _ = data.draw(st.sampled_from(self.held))
            got = self.fake.check(match, tokens, salt)
            assert (list(got) == []) == (extra is None)
            if extra is not None:
                np.testing.assert_array_equal(got["hidden"], extra)
            self.saved += match.length

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            match, entry, _, pins = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            match.release()
            match.release()
            pins[entry] -= 1

    @rule()
    def clear(self) -> None:
        self.fake.cache.clear()
        self.cleared += len(self.entries) * self.recurrent
        self.entries, self.extras, self.pins = [], {}, Counter()

    @rule(tokens=tokens.filter(len), salt=salts, data=st.data())
    def next_snapshot(self, tokens: list[int], salt: str | None, data: st.DataObject) -> None:
        n = len(tokens)
        past = data.draw(st.integers(0, n - 1))
        got = self.fake.cache.next_snapshot(tokens, past, salt)
        wanted = {n}
        if self.recurrent:
            known = {len(t) for s, t in self.entries if s == salt and t == tuple(tokens[: len(t)])}
            shared = [b for b in self.ends(n - 1) if b % self.block == 0]
            shared = [b for b in shared if (salt, tuple(tokens[:b])) in self.blocks(self.entries)]
            periodic = list(range(self.every, n, self.every)) if self.every else []
            wanted |= {p for p in [*shared[-1:], *periodic] if p > past + PENDING} - known
        assert got == min(wanted)

    @invariant()
    def holds_what_it_should(self) -> None:
        s = self.fake.cache.statistics()
        assert s.row_bytes == self.bytes_of_rows(self.entries)
        assert s.snapshot_bytes == self.bytes_of_snapshots()
        assert s.bytes <= self.capacity
        assert s.blocks == len(self.blocks(self.entries))
        assert s.snapshots == len(self.entries) * self.recurrent
        assert (s.queries, s.hits, s.refused) == (self.queries, self.hits, self.refused)
        assert (s.saved_tokens, s.stores) == (self.saved, self.stores)
        if self.recurrent:
            assert s.evicted_snapshots == s.stores - s.snapshots - self.cleared


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase


# --- behaviours -----------------------------------------------------------------------------------------------


def test_partial_block_never_hits_stale_state():
    """A prompt ended within a block; its slot went on. Only what has all of the prompt starts from there."""
    fake = Fake(block=4)
    fake.store([1, 2, 3, 4, 5, 6], 6)
    fake.store([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 10)
    assert fake.length([1, 2, 3, 4, 5, 6, 0, 0, 0]) == 6
    assert fake.length([1, 2, 3, 4, 5, 0, 0, 0, 0]) == 0  # inside the partial block
    assert fake.length([1, 2, 3, 4, 5, 6, 7, 8, 0, 0]) == 6  # the full block has rows, but no snapshot
    assert fake.length([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0]) == 10


def test_longest_of_several_partial_blocks():
    fake = Fake(block=4)
    for n in (1, 3, 2):
        fake.store([1, 2, 3][:n])
    assert [fake.length([*t, 9]) for t in ([1], [1, 2], [1, 2, 3])] == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_last_token_is_always_left_to_feed(kind):
    fake = Fake(kind, block=2)
    fake.store([1, 2, 3, 4])
    assert fake.length([1, 2, 3, 4]) == (2 if kind == "attention" else 0)
    assert fake.length([1, 2, 3, 4, 5]) == 4
    assert fake.length([1]) == fake.length([]) == 0


def test_salts_share_nothing():
    fake = Fake()
    fake.store([1, 2, 3, 4], salt="a")
    assert fake.length([1, 2, 3, 4, 5], "b") == fake.length([1, 2, 3, 4, 5]) == 0
    assert fake.length([1, 2, 3, 4, 5], "a") == 4


def serve(fake: Fake, prompt: list[int], budget: int = 100) -> int:
    """Feed a prompt as a scheduler would; returns what matched."""
    fed = matched = fake.length(prompt)
    while fed < len(prompt):
        end = fake.cache.next_snapshot(prompt, fed)
        n = min(budget, end - fed)
        fed += n
        committed = fed - (n if n <= PENDING else 0)
        if committed == end:
            fake.store(prompt, committed)
    fake.store(prompt)  # with the first decoded token, if not before
    return matched


def test_third_prompt_with_a_system_prompt_starts_behind_it():
    """The second shows where they part; nobody has to say."""
    fake, system = Fake(block=4), list(range(9))
    hits = [serve(fake, [*system, 20 + i, 30, 31]) for i in range(4)]
    assert hits == [0, 0, 8, 8]


@pytest.mark.parametrize("n", [15, 16, 17])
def test_third_time_of_a_prompt_recomputes_at_most_a_block(n):
    fake, prompt = Fake(block=4), list(range(n))
    hits = [serve(fake, prompt) for _ in range(4)]
    assert hits[:2] == [0, 0]
    assert hits[2] == hits[3] == (n - 1) // 4 * 4


def test_snapshots_of_a_long_prompt_are_spaced():
    fake = Fake(block=2, every=2)
    serve(fake, list(range(14)), budget=5)
    s = fake.cache.statistics()
    assert (s.blocks, s.snapshots) == (7, 4)
    assert [fake.length([*range(n), 99, 99]) for n in (3, 4, 7, 8, 13, 14)] == [0, 4, 4, 8, 12, 14]


def test_no_pause_where_a_snapshot_is_known():
    fake, prompt = Fake(block=2, every=2), list(range(14))
    fake.store(prompt, 4)
    assert [fake.cache.next_snapshot(prompt, past) for past in (0, 1, 5, 6, 9, 10)] == [8, 8, 8, 12, 12, 14]
    fake.store(prompt, 10)
    assert fake.cache.next_snapshot([*range(10), 99, 99], 0) == 8


def test_small_cache_follows_a_conversation():
    """With room for one snapshot, every turn starts where the one before ended."""
    rows = 13 * (24 + 12 + 8 + TOKEN) - 8
    fake, tokens = Fake(capacity=rows + SNAPSHOT), [1, 2, 3, 4]
    for _ in range(4):
        assert fake.store(tokens)
        assert fake.length([*tokens, 7, 7, 7]) == len(tokens)
        tokens += [7, 7, 7]
    assert fake.cache.statistics().snapshots == 1


def test_shared_prefix_outlives_prompts_nobody_continues():
    fake, system = Fake(block=4, capacity=5 * SNAPSHOT + 12 * (44 + TOKEN)), [0, 1, 2, 3]
    fake.store(system)
    for i in range(30):
        assert fake.length([*system, 10 + i, 5]) == 4
        assert fake.store([*system, 10 + i])
    s = fake.cache.statistics()
    assert s.evicted_snapshots == s.evicted_blocks > 20


def test_too_large_a_prompt_evicts_nothing():
    fake = Fake(capacity=SNAPSHOT + 8 * (44 + TOKEN))
    assert fake.store([1, 2, 3])
    assert not fake.store(list(range(9)))
    assert fake.length([1, 2, 3, 4]) == 3
    assert fake.cache.statistics().refused == 1


def test_failed_store_leaves_no_rows_that_cannot_match():
    """The snapshot it was to continue from had to go, and what is held left no room all the same."""
    block = SNAPSHOT + 2 * (44 + TOKEN) - 8
    fake = Fake(block=2, capacity=2 * block + 10)
    fake.store([1, 2])
    fake.store([5, 6])
    with fake.cache.match([5, 6, 7]):
        assert not fake.store([1, 2, 3, 4])
        s = fake.cache.statistics()
        assert (s.blocks, s.snapshots, s.bytes) == (1, 1, block)
    assert fake.store([1, 2, 3, 4])


def test_extending_a_prefix_does_not_evict_it():
    fake = Fake("attention", block=2, capacity=3 * 2 * (44 + TOKEN))
    fake.store([1, 2], extra={"hidden": np.ones(3)})
    fake.store([5, 6])
    assert fake.store([1, 2, 3, 4])
    assert fake.length([5, 6, 7]) == 0
    with fake.cache.match([1, 2, 9]) as match:
        assert list(fake.check(match, [1, 2], None)) == ["hidden"]


def test_held_match_survives_eviction_and_clear():
    fake = Fake(capacity=SNAPSHOT + 4 * (44 + TOKEN))
    fake.store([1, 2, 3])
    match = fake.cache.match([1, 2, 3, 4])
    assert not fake.store([5, 6])
    fake.cache.clear()
    assert fake.store([5, 6])
    fake.check(match, [1, 2, 3], None)
    assert fake.length([1, 2, 3, 4]) == 0
    match.release()
    with pytest.raises(ValueError, match="released"):
        fake.cache.restore(match, blank(fake.states), 0)


def test_clear_frees_memory_at_once():
    fake = Fake()
    fake.store([1, 2, 3, 4, 5], extra={"hidden": np.ones(3)})
    with fake.cache.match([1, 2, 3, 4, 5, 6]) as match:
        array = weakref.ref(fake.check(match, [1, 2, 3, 4, 5], None)["hidden"])
    del match
    assert array() is not None
    fake.cache.clear()
    assert array() is None
    assert fake.cache.statistics().bytes == 0


def test_stored_arrays_are_copies():
    fake, hidden = Fake(), np.ones(3)
    state = committed_state(fake.states, 0, [1, 2, 3], None)
    assert fake.cache.store([1, 2, 3], state, 0, 3, extra={"hidden": hidden})
    for array in (*state.values(), hidden):
        array[:] = 0
    with fake.cache.match([1, 2, 3, 4]) as match:
        assert fake.check(match, [1, 2, 3], None)["hidden"].tolist() == [1, 1, 1]


def test_tokens_may_be_an_array():
    fake = Fake()
    fake.store(np.array([1, 2, 3, 4]))
    assert fake.length([1, 2, 3, 4, 5]) == fake.length(np.array([1, 2, 3, 4, 5])) == 4


def test_wrong_calls_are_refused():
    fake, state = Fake(), blank(KINDS["hybrid"])
    for kwargs in ({"block": 0}, {"pending": -1}, {"capacity": -1}, {"snapshot_every": -1}):
        with pytest.raises(ValueError, match="prefix cache"):
            PrefixCache(fake.states, **{"capacity": 1, **kwargs})
    for ahead in ({"ssm.0": 1}, {"nothing": 1}, {"key.1": -1}):
        with pytest.raises(ValueError, match="lookahead"):
            PrefixCache(fake.states, capacity=1, lookahead=ahead)
    with pytest.raises(ValueError, match="3 tokens"):
        fake.cache.store([1, 2], state, 0, 3)
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match="slot"):
            fake.cache.store([1, 2], state, slot, 2)
    with pytest.raises(ValueError, match="21 tokens exceed the 20 positions"):
        fake.cache.store([0] * 21, state, 0, 21)
    with pytest.raises(ValueError, match=r"ssm\.0"):
        fake.cache.store([1, 2], {n: a for n, a in state.items() if n != "ssm.0"}, 0, 2)
