# SPDX-License-Identifier: Apache-2.0
"""Rows of requests through a session: a batch of what they feed, and what comes out of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, Slots, StepBatch, StepOutput
from nemo_build.runtime.choice import likeliest
from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.base import Committed
from nemo_build.runtime.speculation.rounds import NO_DRAFTS, Drafts, Speculation
from nemo_build.state import stays_pending

_WORTH_A_THREAD = 1e-3
"""Seconds of a step from which on the next is prepared meanwhile; a shorter one is over before a thread has begun."""


class StateLostError(Exception):
    """What computes rows has lost the state of all slots, and works again."""


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


class RowRunner(ABC):
    """Computes rows, and lets requests take what comes out.

    Args:
        slots: Where the state of the rows is.
        speculation: What is to be told of committed tokens; ``None``: nobody.
        keep_all: Tell it of those of finished requests too, which are to be saved.
    """

    def __init__(self, slots: Slots, speculation: Speculation | None, *, keep_all: bool) -> None:
        self._slots = slots
        self._speculation = speculation
        self._keep_all = keep_all
        self._pool: ThreadPoolExecutor | None = None
        self._computing = False  # whether the thread has something to do, as far as is known
        self._seconds = 0.0

    @abstractmethod
    def run(self, rows: Sequence[Row]) -> Computed:
        """Run a step; perhaps in another thread than :meth:`choose`."""

    @abstractmethod
    def choose(self, computed: Computed) -> Iterator[tuple[int, NDArray[np.float32] | None]]:
        """Let each request take its tokens: how many drafts were accepted, and the features ``[L, F]`` of its row."""

    def compute(self, rows: Sequence[Row], meanwhile: Callable[[], None]) -> Computed:
        """Run a step, and do something else while it is computed, or after it if that is not worth a thread.

        Args:
            rows: At least one.
            meanwhile: Must leave the rows and their slots alone.
        """
        if self._seconds < _WORTH_A_THREAD or not self._slots.isolated:
            computed = self.run(rows)
            self._seconds = computed.seconds
            meanwhile()
            return computed
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "step")
        self._computing = True
        computing = self._pool.submit(self.run, rows)
        try:
            meanwhile()
        finally:
            computed = computing.result()
        self._computing = False
        self._seconds = computed.seconds
        return computed

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
        committed: list[Committed] = []
        results = []
        for row, (accepted, features) in zip(computed.rows, self.choose(computed), strict=True):
            request, drafts = row.request, row.drafts
            count = len(row.tokens) - len(drafts.tokens) + accepted
            # Drafts behind the end of a text were not judged.
            judged = accepted if request.finished else len(drafts.tokens)
            request.rejected += judged - accepted
            results.append((judged, accepted))
            past = request.fed
            request.fed += count
            request.uncommitted = count if stays_pending(len(row.tokens), self._slots.pending) else 0
            if self._speculation is not None and self._is_told(request):
                assert request.slot is not None, "a row has a slot"
                known = request.tokens[past : past + count + 1]
                taken = None if features is None else features[:count]
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


class StepRunner(RowRunner):
    """Computes rows with a session in this process; arguments as those of :class:`RowRunner`.

    Args:
        session: The target.
    """

    def __init__(self, session: Session, speculation: Speculation | None, *, keep_all: bool) -> None:
        super().__init__(session, speculation, keep_all=keep_all)
        self._session = session
        self._features = speculation.speculator.features if speculation is not None else None

    def run(self, rows: Sequence[Row]) -> Computed:
        batch = _batch(rows, lean=not any(r.request.watched for r in rows))
        start = time.perf_counter()
        output = self._session.step(batch)
        return Computed(rows, output, time.perf_counter() - start)

    def choose(self, computed: Computed) -> Iterator[tuple[int, NDArray[np.float32] | None]]:
        logits, output = computed.output.logits, computed.output
        features = getattr(output, self._features) if self._features else None  # None too of a lean step
        best, finite = likeliest([r.request.chooser for r in computed.rows], logits)
        method = self._speculation.method if self._speculation is not None else "token"
        first = 0
        for i, row in enumerate(computed.rows):
            drafts, end, accepted = row.drafts, first + row.wanted, 0
            if row.wanted:
                likely = best[first:end] if finite else None
                accepted = row.request.choose(
                    logits[first:end], likely, drafts.tokens, drafts.probabilities, method
                )
            yield accepted, None if features is None else features[i]
            first = end


def _batch(rows: Sequence[Row], *, lean: bool) -> StepBatch:
    """The rows as a session takes them."""
    batch = StepBatch.of_rows(
        [r.tokens for r in rows],
        past=[r.request.fed for r in rows],
        slots=[r.request.slot for r in rows if r.request.slot is not None],
        accepted=[r.request.uncommitted for r in rows],
        logits="none",
    )
    return batch.replace(logit_rows=last_rows(batch, [r.wanted for r in rows]), lean=lean)


def last_rows(batch: StepBatch, wanted: Sequence[int]) -> NDArray[np.int64]:
    """The rows of a batch's tokens at which logits are wanted: of row i the last ``wanted[i]``."""
    counts = np.array(wanted)
    # Row i wants its last tokens: those up to i * width + its length, counted from there.
    ends = np.arange(len(counts)) * batch.input_ids.shape[1] + batch.lengths
    total = np.cumsum(counts)
    return np.repeat(ends - total, counts) + np.arange(total[-1])
