# SPDX-License-Identifier: Apache-2.0
"""Sequences that are generated together: chunked prefill, batched decode, slots."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.plan import PREFILL_CHUNK
from nemo_build.engines.session import Session, StepBatch
from nemo_build.errors import RequestError
from nemo_build.runtime.detokenizer import IncrementalDetokenizer, TokenTable
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import NonFiniteLogitsError, TokenCounts, sample
from nemo_build.runtime.stopping import StepText, StopState


class RunningSequence:
    """One request on its way: its tokens, and how far the session has come with them.

    Args:
        prompt: Token ids, at least one.
        params: How to go on from there; ``max_tokens`` is lowered to what fits the context.
        eos_ids: Ids that end it.
        table: The tokenizer.
        context: Positions of the session.
        prefill_chunk: Most prompt tokens in one step.
        skip_special_tokens: Leave control tokens out of the text.

    Attributes:
        events: Tokens and their text that nobody has taken yet.
        error: Why it was given up, or ``None``.
        tokens: Prompt and output.
        prompt_tokens: Length of the prompt.
        fed: Tokens that the session has seen.
        slot: State slot, or ``None`` while it waits and after its end.
        uncommitted: Tokens of the last step that the session holds pending.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_ids: Collection[int],
        table: TokenTable,
        context: int,
        prefill_chunk: int = PREFILL_CHUNK,
        skip_special_tokens: bool = True,
    ) -> None:
        if prefill_chunk < 1:
            raise RequestError(f"prefill_chunk is {prefill_chunk}; it must be at least 1.")
        room = context - len(prompt) + 1  # the last token is never fed
        limit = min(params.max_tokens, room)
        self.params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.fed = 0
        self.slot: int | None = None
        self.uncommitted = 0
        self.prefill_chunk = prefill_chunk
        self.events: deque[tuple[int, StepText]] = deque()
        self.error: NonFiniteLogitsError | None = None
        self._counts = TokenCounts(prompt) if params.uses_counts else None
        self._eos_ids = eos_ids
        detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
        self._stop = StopState(self.params, eos_ids, detokenizer)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self._stop.finish_reason is not None or self.error is not None

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def next_tokens(self) -> list[int]:
        """What the session is to see next: a chunk of the prompt, or the last token."""
        return self.tokens[self.fed : self.fed + self.prefill_chunk]

    def choose(self, logits: NDArray[np.float32]) -> None:
        """Choose the next token from its logits ``[V]`` and add it to the events; give up if that cannot be."""
        try:
            token = sample(
                logits,
                self.params,
                self._counts,
                seed=self.seed,
                position=len(self.tokens),
                eos_ids=self._eos_ids,
                num_output=len(self.tokens) - self.prompt_tokens,
            )
        except NonFiniteLogitsError as error:
            self.error = error
            return
        self.tokens.append(token)
        if self._counts is not None:
            self._counts.push(token)
        self.events.append((token, self._stop.push(token)))

    def cancel(self) -> None:
        """End it from outside, if it has not ended."""
        if not self.finished:
            self._stop.cancel()


class Batch:
    """Runs sequences on a session: as many at a time as it has slots, the others wait their turn.

    A step either feeds the next chunk of every unfinished prompt, or one token of every sequence.

    Args:
        session: An open target graph, of which this is the only user.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._free = list(range(session.slots - 1, -1, -1))
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []

    def add(self, sequence: RunningSequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    @property
    def unfinished(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._waiting or self._running)

    def cancel(self, sequence: RunningSequence) -> None:
        """End a sequence now, if it has not ended, and free its slot."""
        sequence.cancel()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._release_finished()

    def step(self) -> None:
        """Run one step; the sequences that get a token have it in their events."""
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop()
            self._running.append(sequence)
        # A sequence that has more than its last token to feed is still in its prompt.
        prefilling = [s for s in self._running if len(s.tokens) - s.fed > 1]
        rows = prefilling or self._running
        chunks = [s.next_tokens for s in rows]
        ends = [s.fed + len(c) == len(s.tokens) for s, c in zip(rows, chunks, strict=True)]
        batch = StepBatch.of_rows(
            chunks,
            past=[s.fed for s in rows],
            slots=[s.slot for s in rows if s.slot is not None],
            accepted=[s.uncommitted for s in rows],
        )
        batch = replace(batch, logit_rows=batch.logit_rows[np.array(ends)])
        logits = iter(self._session.step(batch).logits)
        for sequence, chunk, end in zip(rows, chunks, ends, strict=True):
            sequence.fed += len(chunk)
            sequence.uncommitted = len(chunk) if len(chunk) <= self._session.pending else 0
            if end:
                sequence.choose(next(logits))
        self._release_finished()

    def _release_finished(self) -> None:
        for sequence in [s for s in self._running if s.finished]:
            self._running.remove(sequence)
            if sequence.slot is not None:
                self._free.append(sequence.slot)
                sequence.slot = None
