# SPDX-License-Identifier: Apache-2.0
"""Sequences that are generated together: chunked prefill, batched decode, slots."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.plan import PREFILL_CHUNK
from nemo_build.engines.session import Session, StepBatch
from nemo_build.errors import RequestError
from nemo_build.runtime.detokenizer import IncrementalDetokenizer, TokenTable
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import NonFiniteLogitsError, TokenCounts
from nemo_build.runtime.speculation.base import Committed, Speculator
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.runtime.speculation.verify import verify
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
        self._context = context
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

    @property
    def prefilling(self) -> bool:
        """Whether it has more than its last token to feed."""
        return len(self.tokens) - self.fed > 1

    @property
    def most_drafts(self) -> int:
        """How many drafts could be of use: one token comes without them, and none is fed past the context."""
        left = self.params.max_tokens - len(self.output)
        return max(0, min(left - 1, self._context - self.fed - 1))

    def choose(self, logits: NDArray[np.float32], drafts: Sequence[int] = ()) -> int:
        """Take the tokens that follow the last one, and add them to the events; give up if that cannot be.

        Args:
            logits: ``[len(drafts) + 1, V]``: after the last token, and after each draft.
            drafts: Tokens that may follow.

        Returns:
            How many drafts were accepted.
        """
        try:
            verdict = verify(
                logits,
                drafts,
                self.params,
                self._counts,
                seed=self.seed,
                position=len(self.tokens),
                eos_ids=self._eos_ids,
                num_output=len(self.tokens) - self.prompt_tokens,
            )
        except NonFiniteLogitsError as error:
            self.error = error
            return 0
        for token in verdict.tokens:
            if self.finished:
                break  # a stop string within an accepted run
            self.tokens.append(token)
            if self._counts is not None:
                self._counts.push(token)
            self.events.append((token, self._stop.push(token)))
        return verdict.accepted

    def cancel(self) -> None:
        """End it from outside, if it has not ended."""
        if not self.finished:
            self._stop.cancel()


@dataclass
class Speculation:
    """How a batch speculates.

    Attributes:
        speculator: Where drafts come from.
        draft_length: Most drafts of a sequence in a step; the session keeps at least one more pending.
        controller: What chooses a length up to that from step to step, or ``None`` to draft as many always.
    """

    speculator: Speculator
    draft_length: int
    controller: DraftLengthController | None = None


@dataclass
class Acceptance:
    """What came of the drafts so far.

    Attributes:
        steps: Verifications, of one sequence each.
        drafted: Drafts by position; ``drafted[0]`` counts first drafts.
        accepted: Accepted ones likewise.
    """

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: int) -> None:
        """Count one verification."""
        self.steps += 1
        while len(self.drafted) < drafts:
            self.drafted.append(0)
            self.accepted.append(0)
        for i in range(drafts):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    @property
    def length(self) -> float:
        """Acceptance length: tokens that a verification yields on average, the one without a draft included."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0


class Batch:
    """Runs sequences on a session: as many at a time as it has slots, the others wait their turn.

    A step feeds every running sequence: the next chunk of its prompt, or its last token and drafts of what follows.

    Args:
        session: An open target graph, of which this is the only user.
        speculation: Where drafts come from, or ``None`` for none.

    Attributes:
        acceptance: What came of the drafts.
    """

    def __init__(self, session: Session, speculation: Speculation | None = None) -> None:
        self._session = session
        self._speculation = speculation
        self._free = list(range(session.slots - 1, -1, -1))
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self.acceptance = Acceptance()
        self._length = 0  # that the controller chose last
        self._chosen = False  # whether it chose for the step under way

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
        """Run one step; the sequences that get tokens have them in their events.

        A step that fails or is interrupted leaves its sequences' state unknown, so it ends them all.
        """
        try:
            self._step()
        except BaseException:
            for sequence in self._running:
                sequence.cancel()
            self._release_finished()
            raise

    def _step(self) -> None:
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop()
            self._running.append(sequence)
        rows = list(self._running)
        start = time.perf_counter()
        drafts = self._drafts(rows)
        drafted = time.perf_counter()
        chunks = [s.next_tokens + d for s, d in zip(rows, drafts, strict=True)]
        batch = StepBatch.of_rows(
            chunks,
            past=[s.fed for s in rows],
            slots=[s.slot for s in rows if s.slot is not None],
            accepted=[s.uncommitted for s in rows],
            logits="none",
        )
        wanted = [_logit_rows(s, c, d) for s, c, d in zip(rows, chunks, drafts, strict=True)]
        width = batch.input_ids.shape[1]
        at = np.concatenate([i * width + w for i, w in enumerate(wanted)])
        output = self._session.step(batch.replace(logit_rows=at))
        seconds = time.perf_counter() - drafted
        wants = self._speculation.speculator.features if self._speculation is not None else None
        features = getattr(output, wants) if wants else None
        committed, results = [], []
        first = 0
        for i, (sequence, chunk, draft, w) in enumerate(zip(rows, chunks, drafts, wanted, strict=True)):
            count = len(chunk)
            if len(w):
                accepted = sequence.choose(output.logits[first : first + len(w)], draft)
                first += len(w)
                count -= len(draft) - accepted
                # Drafts behind the end of a text were not judged.
                judged = accepted if sequence.finished else len(draft)
                results.append((judged, accepted))
                if judged:
                    self.acceptance.add(judged, accepted)
            committed.append(self._commit(sequence, len(chunk), count, features, i))
        self._release_finished()
        if self._speculation is not None:
            going_on = [c for s, c in zip(rows, committed, strict=True) if not s.finished]
            if going_on:
                self._speculation.speculator.observe(going_on)
            if self._speculation.controller is not None and self._chosen:
                self._speculation.controller.observe(results, seconds, drafted - start)

    def _drafts(self, rows: Sequence[RunningSequence]) -> list[list[int]]:
        """Drafts for the rows that are not in their prompt."""
        drafts: list[list[int]] = [[] for _ in rows]
        if self._speculation is None:
            return drafts
        decoding = [i for i, s in enumerate(rows) if not s.prefilling and s.fed > 0]
        most = self._speculation.draft_length
        controller = self._speculation.controller
        # Steps that also feed prompts say nothing about the cost of drafts.
        self._chosen = controller is not None and len(decoding) == len(rows)
        if controller is not None and self._chosen:
            most = self._length = controller.choose(len(rows))
        elif controller is not None:
            most = self._length
        lengths = [min(most, rows[i].most_drafts) for i in decoding]
        slots = [rows[i].slot for i in decoding]
        proposals = self._speculation.speculator.propose([s for s in slots if s is not None], lengths)
        for i, proposal in zip(decoding, proposals, strict=True):
            drafts[i] = proposal
        return drafts

    def _commit(
        self, sequence: RunningSequence, fed: int, count: int, features: NDArray[np.float32] | None, row: int
    ) -> Committed:
        """Note that `count` of the `fed` tokens are the sequence's."""
        past, slot = sequence.fed, sequence.slot
        assert slot is not None, "a running sequence has a slot"
        sequence.fed += count
        sequence.uncommitted = count if fed <= self._session.pending else 0
        return Committed(
            slot=slot,
            past=past,
            tokens=sequence.tokens[past : past + count + 1],
            features=None if features is None else features[row, :count],
        )

    def _release_finished(self) -> None:
        for sequence in [s for s in self._running if s.finished]:
            self._running.remove(sequence)
            if sequence.slot is not None:
                self._free.append(sequence.slot)
                sequence.slot = None


def _logit_rows(sequence: RunningSequence, chunk: Sequence[int], drafts: Sequence[int]) -> NDArray[np.int64]:
    """Tokens of a row after which the next one is wanted: none within a prompt, else the last and all drafts."""
    if sequence.fed + len(chunk) - len(drafts) < len(sequence.tokens):
        return np.empty(0, np.int64)
    return np.arange(len(chunk) - len(drafts) - 1, len(chunk), dtype=np.int64)
