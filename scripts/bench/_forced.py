# SPDX-License-Identifier: Apache-2.0
"""Drafts that are accepted at a given rate: sessions and speculators run as always, and then what they say is changed.

A drafter's tokens are replaced by random ones, and the target's logits so that it chooses each of them with the given
probability. So costs are real, also of the experts that different tokens are routed to, and the text is random.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch, StepOutput
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Proposal, Speculator


class RandomDrafts:
    """Implements :class:`~nemo_build.runtime.speculation.base.Speculator`: random tokens instead of the inner one's.

    Args:
        inner: Its rounds are run in full.
        vocabulary: Number of tokens.
        seed: Of what is drawn.

    Attributes:
        rounds: Of each call of :meth:`propose`: the longest proposal, and its seconds.
    """

    def __init__(self, inner: Speculator, vocabulary: int, seed: int) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)
        self.features, self.states, self.lookahead = inner.features, inner.states, inner.lookahead
        self.rounds: list[tuple[int, float]] = []

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The inner one's."""
        return self._inner.state()

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        """Begin a sequence."""
        self._inner.start(slot, tokens, extra)

    def observe(self, rows: Sequence[Committed]) -> None:
        """Follow the sequences."""
        self._inner.observe(rows)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Other tokens in place of the inner one's, as many."""
        start = time.perf_counter()
        lengths = [len(p.tokens) for p in self._inner.propose(requests)]
        self.rounds.append((max(lengths, default=0), time.perf_counter() - start))
        return [Proposal(self._rng.integers(0, self._vocabulary, n).tolist()) for n in lengths]

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        """The inner one's."""
        return self._inner.save(slot, committed)

    def release(self, slot: int) -> None:
        """Forget the sequence."""
        self._inner.release(slot)


class ForcedSession:
    """A session that chooses what it is shown, and notes how long each step takes.

    Args:
        session: It computes the steps.
        rate: How likely the token that a row has next is made the likeliest.
        seed: Of what is drawn.

    Attributes:
        steps: Of each step: tokens of its longest row, and seconds.
    """

    def __init__(self, session: Session, rate: float, seed: int) -> None:
        self._session = session
        self._rate = rate
        self._rng = np.random.default_rng(seed)
        self.steps: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self, batch: StepBatch) -> StepOutput:
        """Run a step."""
        start = time.perf_counter()
        output = self._session.step(batch)
        width = batch.input_ids.shape[1]
        self.steps.append((width, time.perf_counter() - start))
        rows, columns = np.divmod(batch.logit_rows, width)
        followed = np.flatnonzero(columns + 1 < batch.lengths[rows])
        for i in followed[self._rng.random(len(followed)) < self._rate]:
            logits = output.logits[i]
            logits[batch.input_ids[rows[i], columns[i] + 1]] = logits.max() + 1
        return output


def expected(rate: float, length: int) -> float:
    """Tokens that a step with so many drafts gives on average (Leviathan et al., arXiv:2211.17192, section 3.1)."""
    return sum(rate**i for i in range(length + 1))


def break_even(cost: float, length: int) -> float | None:
    """The rate at which so many drafts give as many tokens as their step costs; ``None``: not even at 1."""
    if expected(1.0, length) < cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, length) < cost else (low, middle)
    return high
