# SPDX-License-Identifier: Apache-2.0
"""Rows of requests through a session: a batch of what they feed, and what comes out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch, StepOutput
from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.base import Committed
from nemo_build.runtime.speculation.rounds import NO_DRAFTS, Drafts, Speculation
from nemo_build.state import stays_pending

_WORTH_A_THREAD = 1e-3
"""Seconds of a step from which on the next is prepared meanwhile; a shorter one is over before a thread has begun."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a request feeds in a step.

    Attributes:
        request: The request, which has a slot.
        tokens: A chunk of its tokens, or the last one and drafts.
        wanted: After how many of the last of these the next token is wanted.
        drafts: The drafts among them.
    """

    request: Request
    tokens: list[int]
    wanted: int
    drafts: Drafts = NO_DRAFTS


@dataclass(frozen=True)
class Computed:
    """Rows that went through a step."""

    rows: Sequence[Row]
    output: StepOutput
    seconds: float


class StepRunner:
    """Computes rows, and lets requests take what comes out.

    Args:
        session: The target.
        speculation: What is to be told of committed tokens; ``None``: nobody.
        keep_all: Tell it of those of finished requests too, which are to be saved.
    """

    def __init__(self, session: Session, speculation: Speculation | None, *, keep_all: bool) -> None:
        self._session = session
        self._speculation = speculation
        self._features = speculation.speculator.features if speculation is not None else None
        self._keep_all = keep_all
        self._pool: ThreadPoolExecutor | None = None
        self._computing = False  # whether the thread has something to do, as far as is known
        self._seconds = 0.0

    def compute(self, rows: Sequence[Row], meanwhile: Callable[[], None]) -> Computed:
        """Run a step, and do something else while it is computed, or after it if that is not worth a thread.

        Args:
            rows: At least one.
            meanwhile: Must leave the rows and their slots alone.
        """
        batch = _batch(rows, lean=not any(r.request.watched for r in rows))
        if self._seconds < _WORTH_A_THREAD or not self._session.isolated:
            output, self._seconds = self._timed(batch)
            meanwhile()
            return Computed(rows, output, self._seconds)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "step")
        self._computing = True
        computing = self._pool.submit(self._timed, batch)
        try:
            meanwhile()
        finally:
            output, self._seconds = computing.result()
        self._computing = False
        return Computed(rows, output, self._seconds)

    def settle(self) -> None:
        """Wait for what an interrupted caller left behind to be computed; until then its slots must be left alone."""
        if self._computing and self._pool is not None:
            self._pool.submit(bool).result()
            self._computing = False

    def take(self, computed: Computed) -> list[tuple[int, int]]:
        """Give each request its tokens and advance it.

        Returns:
            For each row how many drafts were judged, and how many accepted.
        """
        logits, output = computed.output.logits, computed.output
        features = getattr(output, self._features) if self._features else None  # None too of a lean step
        likeliest, finite = _likeliest(computed.rows, logits)
        method = self._speculation.method if self._speculation is not None else "token"
        committed: list[Committed] = []
        results = []
        first = 0
        for i, row in enumerate(computed.rows):
            request, drafts, count = row.request, row.drafts, len(row.tokens)
            judged = accepted = 0
            if row.wanted:
                end = first + row.wanted
                best = likeliest[first:end] if finite else None
                accepted = request.choose(
                    logits[first:end], best, drafts.tokens, drafts.probabilities, method
                )
                first = end
                count -= len(drafts.tokens) - accepted
                # Drafts behind the end of a text were not judged.
                judged = accepted if request.finished else len(drafts.tokens)
            results.append((judged, accepted))
            past = request.fed
            request.fed += count
            request.uncommitted = count if stays_pending(len(row.tokens), self._session.pending) else 0
            if self._speculation is not None and self._is_told(request):
                assert request.slot is not None, "a row has a slot"
                known = request.tokens[past : past + count + 1]
                taken = None if features is None else features[i, :count]
                committed.append(Committed(request.slot, past, known, taken))
                request.followed = True
        if self._speculation is not None:
            self._speculation.observe(committed)
        return results

    def _is_told(self, request: Request) -> bool:
        """Whether the speculator hears of what a request committed; it must know the token after it."""
        if request.finished and not (self._keep_all and len(request.tokens) > request.fed):
            return False
        return request.watched

    def _timed(self, batch: StepBatch) -> tuple[StepOutput, float]:
        start = time.perf_counter()
        output = self._session.step(batch)
        return output, time.perf_counter() - start


def _batch(rows: Sequence[Row], *, lean: bool) -> StepBatch:
    """The rows as a session takes them."""
    batch = StepBatch.of_rows(
        [r.tokens for r in rows],
        past=[r.request.fed for r in rows],
        slots=[r.request.slot for r in rows if r.request.slot is not None],
        accepted=[r.request.uncommitted for r in rows],
        logits="none",
    )
    width = batch.input_ids.shape[1]
    counts = np.array([r.wanted for r in rows])
    # Row i wants its last tokens: those up to i * width + its length, counted from there.
    ends = np.arange(len(rows)) * width + batch.lengths
    total = np.cumsum(counts)
    return batch.replace(logit_rows=np.repeat(ends - total, counts) + np.arange(total[-1]), lean=lean)


def _likeliest(rows: Sequence[Row], logits: NDArray[np.float32]) -> tuple[list[int], bool]:
    """The most likely tokens by each row of logits, if anybody asks for them, and whether all are finite."""
    if not len(logits) or not any(r.request.takes_likeliest for r in rows):
        return [], False
    tokens: NDArray[Any] = logits.argmax(axis=-1)
    finite = bool(np.isfinite(logits[np.arange(len(tokens)), tokens]).all())
    return tokens.tolist(), finite
