# SPDX-License-Identifier: Apache-2.0
"""The prefix cache on the demo engine: logits are, to the bit, those without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.plugins import native
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.state import stays_pending


class Server:
    """The demo engine's target with a cache, used as a scheduler would, one sequence at a time."""

    def __init__(
        self, directory: Any, *, pending: int = 0, budget: int = 40, every: int = 2, block: int = 16
    ):
        self.session = OrtSession(
            directory / "target.onnx", slots=3, context=400, pending=pending, threads=1, hidden=True
        )
        self.cache = PrefixCache(
            self.session.states, capacity=10**8, pending=pending, block=block, snapshot_every=every
        )
        self.budget = budget

    def step(self, slot: int, tokens: Sequence[int], past: int, accepted: int = 0) -> np.ndarray:
        """Logits ``[n, V]`` of all new tokens."""
        batch = StepBatch.of_rows([tokens], past=[past], slots=[slot], accepted=[accepted], logits="all")
        return self.session.step(batch).logits

    def prefill(self, slot: int, prompt: list[int], salt: str | None = None) -> tuple[np.ndarray, int, int]:
        """In a slot full of NaN. The last token's logits, what matched, and how many tokens are uncommitted."""
        for buffer in self.session.state().values():
            buffer[slot] = np.nan
        with self.cache.match(prompt, salt) as match:
            self.cache.restore(match, self.session.state(), slot)
            fed = matched = match.length
        uncommitted = 0
        while fed < len(prompt):
            end = self.cache.next_snapshot(prompt, fed, salt)
            chunk = prompt[fed : min(fed + self.budget, end)]
            logits = self.step(slot, chunk, fed, uncommitted)
            fed += len(chunk)
            uncommitted = len(chunk) if stays_pending(len(chunk), self.session.pending) else 0
            if fed - uncommitted == end:
                assert self.cache.store(prompt, self.session.state(), slot, end, salt)
        return logits[-1], matched, uncommitted

    def decode(self, slot: int, tokens: list[int], uncommitted: int, drafts: list[list[int]]) -> list[int]:
        """Append greedy tokens, verifying drafts; store what is committed at the end. Returns accepted counts."""
        counts = []
        for draft in drafts:
            fed = len(tokens) - 1
            best = self.step(slot, [tokens[-1], *draft], fed, uncommitted).argmax(-1).tolist()
            good = next((i for i, d in enumerate(draft) if d != best[i]), len(draft))
            tokens += best[: good + 1]
            uncommitted = good + 1 if stays_pending(len(draft) + 1, self.session.pending) else 0
            counts.append(good)
        committed = len(tokens) - 1 - uncommitted
        assert self.cache.store(tokens, self.session.state(), slot, committed)
        return counts


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(3).integers(20, 2000, 300).tolist()


@pytest.fixture(scope="module")
def truth(demo_engine_directory) -> Any:
    """Logits without a cache: of a prompt's last token, from a session of other sizes and in one chunk."""
    session = OrtSession(demo_engine_directory / "target.onnx", slots=1, context=512, threads=1)

    def logits(tokens: Sequence[int]) -> np.ndarray:
        return session.step(StepBatch.of_rows([tokens], past=[0], slots=[0])).logits[-1]

    return logits


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit where the native kernels run; the reference functions depend on the chunks in the last bits."""
    if native.library() is None:
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("pending", [0, 4])
def test_logits_are_those_without_a_cache(demo_engine_directory, truth, text, pending):
    """Prompts with one beginning, and some again: not a silent no-op, and nobody can tell from the logits."""
    server = Server(demo_engine_directory, pending=pending)
    prompts = [text[:70] + text[n : n + 30] for n in (100, 130, 160)]
    prompts += [prompts[1], text[:40], prompts[0] + text[200:242], prompts[0][:-1]]
    matched = []
    for i, prompt in enumerate(prompts):
        logits, hit, _ = server.prefill(i % 3, prompt)
        same(logits, truth(prompt))
        matched.append(hit)
    assert matched == [0, 64, 64, 96, 32, 100 if pending == 0 else 96, 96]
    s = server.cache.statistics()
    assert (s.hits, s.saved_tokens) == (6, sum(matched))


def test_salted_prompt_computes_its_own(demo_engine_directory, truth, text):
    server = Server(demo_engine_directory)
    matched = [server.prefill(0, text[:40], salt)[1] for salt in ("a", "b", "a", None)]
    assert matched == [0, 0, 32, 0]
    same(server.prefill(1, text[:40], "b")[0], truth(text[:40]))


def test_continuing_after_rejected_drafts(demo_engine_directory, truth, text):
    """A text of verified drafts, some of them wrong, is continued from its last committed token."""
    server = Server(demo_engine_directory, pending=4)
    prompt, plain = text[:50], list(text[:50])
    for _ in range(15):
        plain.append(int(truth(plain).argmax()))
    drafts = [plain[51:54], [plain[55], 0, 0], [0, 0, 0], [], plain[59:61], [0], [plain[63], 0]]
    tokens = [*prompt, plain[50]]
    _, _, uncommitted = server.prefill(1, prompt)
    assert server.decode(1, tokens, uncommitted, drafts) == [3, 1, 0, 0, 2, 0, 1]
    assert tokens == plain[: len(tokens)]
    turn = [*tokens, *text[100:130]]
    for slot in (0, 1):
        logits, hit, _ = server.prefill(slot, turn)
        assert hit == len(tokens) - 1 - 2  # the last was never fed, the two before are pending
        same(logits, truth(turn))


def test_restoring_beside_a_sequence_with_pending_tokens(demo_engine_directory, truth, text):
    """A slot between two steps of its own keeps its pending tokens; the restored one has none."""
    server = Server(demo_engine_directory, pending=3, block=8)
    _, _, uncommitted = server.prefill(0, text[:34])
    assert uncommitted == 2
    server.prefill(1, text[100:130])
    assert server.prefill(1, text[100:140])[1] == 30
    same(server.step(0, [7, 8], 34, uncommitted)[-1], truth([*text[:34], 7, 8]))
    assert server.cache.store(text, server.session.state(), 0, 34)  # committed by that step
    logits, hit, uncommitted = server.prefill(2, text[:36])
    assert (hit, uncommitted) == (34, 2)
    same(logits, truth(text[:36]))
    same(server.step(2, [9], 36, uncommitted)[-1], truth([*text[:36], 9]))


def test_drafter_goes_on_where_the_prefix_ended(demo_engine_directory, text):
    """The MTP module's row at n-1 depends on token n, which the next prompt may have another of."""
    sizes = {"slots": 2, "context": 128, "pending": 3, "threads": 1}
    target = OrtSession(demo_engine_directory / "target.onnx", hidden=True, **sizes)
    mtp = OrtSession(demo_engine_directory / "mtp.onnx", **sizes)
    state = {**target.state(), **mtp.state()}
    ahead = {s.name: 1 for s in mtp.states}
    cache = PrefixCache([*target.states, *mtp.states], capacity=10**8, pending=3, block=8, lookahead=ahead)

    def feed(slot: int, tokens: list[int], past: int, before: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Both graphs; the module sees each token with the hidden state before it. Its logits, and hidden [L, H]."""
        hidden = target.step(StepBatch.of_rows([tokens], past=[past], slots=[slot])).hidden[0]
        pairs = hidden[:-1] if before is None else np.concatenate([before[None], hidden[:-1]])
        batch = StepBatch.of_rows([tokens[-len(pairs) :]], past=[max(past - 1, 0)], slots=[slot])
        return mtp.step(batch.replace(hidden_in=pairs[None])).logits[-1], hidden

    _, hidden = feed(0, text[:30], 0, None)
    assert cache.store(text, state, 0, 30, extra={"hidden": hidden[-1]})
    prompt = text[:30] + text[50:60]
    with cache.match(prompt) as match:
        extra = cache.restore(match, state, 1)
    assert match.length == 30
    got, _ = feed(1, prompt[30:], 30, extra["hidden"])
    want, _ = feed(0, prompt, 0, None)
    same(got, want)
