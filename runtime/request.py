# SPDX-License-Identifier: Apache-2.0
"""A request on its way: its tokens, what the session has seen of them, and what its reader has not taken yet."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.plan import PREFILL_CHUNK
from nemo_build.errors import RequestError
from nemo_build.runtime.choice import TokenChooser
from nemo_build.runtime.constraints.base import Guide
from nemo_build.runtime.detokenizer import IncrementalDetokenizer, TokenTable
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import NonFiniteLogitsError, TokenLogprobs
from nemo_build.runtime.speculation.verify import Method
from nemo_build.runtime.stopping import FinishReason, StepText, StopState

PRIORITY_SECONDS = 10.0
"""A request of one priority more is served as if it had come so much earlier; so none waits for ever."""


@dataclass(frozen=True)
class Scheduling:
    """What a request asks of the scheduler.

    Attributes:
        priority: Higher ones come first, and take the slots of lower ones.
        timeout: Seconds after which it ends with what it has, > 0; ``None``: never.
        salt: Whose prompt it is: the prefix cache shares nothing between different salts.
        prefill_chunk: Most prompt tokens in one step.
        speculate: Whether drafts are made for it, where there is a speculator.

    Raises:
        RequestError: A value is out of range.
    """

    priority: int = 0
    timeout: float | None = None
    salt: Hashable = None
    prefill_chunk: int = PREFILL_CHUNK
    speculate: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.prefill_chunk < 1:
            problems.append(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1")
        try:
            hash(self.salt)
        except TypeError as error:
            problems.append(f"salt is {self.salt!r}: {error}")
        if self.timeout is not None and not self.timeout > 0:
            problems.append(f"timeout is {self.timeout}; it must be above 0 seconds")
        if problems:
            raise RequestError("The request cannot be scheduled:", problems)


@dataclass(frozen=True, slots=True)
class Event:
    """Something new for a request's reader.

    Attributes:
        token: The token, or ``None`` if the request ended without one.
        text: What it adds to the text.
        drafted: Whether it was a draft that was accepted.
        logprobs: The log-probabilities there, if the request asked for them.
    """

    token: int | None
    text: StepText
    drafted: bool = False
    logprobs: TokenLogprobs | None = None


class Request:
    """One request.

    Args:
        prompt: Token ids, at least one.
        params: How to go on from there; ``max_tokens`` is lowered to what fits the context.
        eos_ids: Ids that end it.
        table: The tokenizer.
        context: Positions of the session.
        scheduling: What it asks of the scheduler.
        skip_special_tokens: Leave control tokens out of the text.
        guide: What the output has to obey by the parameters, or ``None``; used by nobody else.

    Attributes:
        events: What the reader has not taken yet.
        error: Why it was given up, or ``None``.
        tokens: Prompt and output.
        prompt_tokens: Length of the prompt.
        cached_tokens: How many of these came from the prefix cache when it first ran.
        fed: Tokens that the session has seen.
        slot: State slot, or ``None`` while it waits and after its end.
        uncommitted: Tokens of the last step that the session holds pending.
        snapshot_at: Up to where the prefix cache wants it to be fed, for a snapshot.
        watched: Whether the speculator is told of what it commits.
        followed: Whether the speculator knows what follows the tokens fed, so that it can draft.
        arrival: When the scheduler got it, by its clock.
        admitted: When it first got a slot, by the same clock; ``None`` before.
        rejected: Drafts for it that were judged and not accepted.
        chooser: What chooses its tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_ids: Collection[int],
        table: TokenTable,
        context: int,
        scheduling: Scheduling | None = None,
        skip_special_tokens: bool = True,
        guide: Guide | None = None,
    ) -> None:
        room = context - len(prompt) + 1  # the last token is never fed
        limit = min(params.max_tokens, room)
        self.params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
        self.scheduling = scheduling or Scheduling()
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.cached_tokens: int | None = None
        self.fed = 0
        self.slot: int | None = None
        self.uncommitted = 0
        self.snapshot_at = 0
        self.watched = self.followed = False
        self.arrival = 0.0
        self.admitted: float | None = None
        self.rejected = 0
        self.events: deque[Event] = deque()
        self._has_ended = False
        self.error: Exception | None = None
        self.chooser = TokenChooser(self.params, seed=self.seed, eos_ids=eos_ids, prompt=prompt, guide=guide)
        self._context = context
        detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
        self._stop = StopState(self.params, eos_ids, detokenizer)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or ``None``; also for those given up."""
        return self._stop.finish_reason

    @property
    def finished(self) -> bool:
        """Whether it has ended; then its last event is there, also for readers in other threads."""
        return self._has_ended or self.error is not None

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def decoding(self) -> bool:
        """Whether its last token alone is to be fed, behind others."""
        return self.fed > 0 and self.fed == len(self.tokens) - 1

    @property
    def committed(self) -> int:
        """Tokens that the state of its slot has seen."""
        return self.fed - self.uncommitted

    @property
    def most_drafts(self) -> int:
        """How many drafts could be of use: one token comes without them, and none is fed past the context."""
        if not self.scheduling.speculate:
            return 0
        left = self.params.max_tokens - (len(self.tokens) - self.prompt_tokens)
        return max(0, min(left - 1, self._context - self.fed - 1))

    @property
    def order(self) -> tuple[float, float]:
        """Place among requests; lower is first. Older ones and those of higher priority come first."""
        return self.arrival - self.scheduling.priority * PRIORITY_SECONDS, self.arrival

    def choose(
        self,
        logits: NDArray[np.float32],
        best: Sequence[int] | None,
        drafts: Sequence[int] = (),
        probabilities: NDArray[np.float64] | None = None,
        method: Method = "token",
    ) -> int:
        """Take the tokens that follow the last one, and add them to the events; give up if that cannot be.

        Args:
            logits: As of :meth:`~nemo_build.runtime.choice.TokenChooser.choose`, like the other arguments.

        Returns:
            How many drafts were accepted.
        """
        try:
            tokens, accepted = self.chooser.choose(logits, best, drafts, probabilities, method)
            found = None if self.params.logprobs is None else self.chooser.logprobs(logits, tokens)
        except (NonFiniteLogitsError, RequestError) as error:
            self.error = error
            return 0
        return self.take(tokens, accepted, found)

    def take(
        self, tokens: Sequence[int], accepted: int, logprobs: Sequence[TokenLogprobs] | None = None
    ) -> int:
        """Append tokens up to the end of the text, and add them to the events.

        Args:
            tokens: They follow the last one.
            accepted: How many of the first of them were drafts.
            logprobs: Of each of them, if the request asked for them.

        Returns:
            How many drafts there are before the end of the text.
        """
        chooser = self.chooser
        for i, token in enumerate(tokens):
            if self._stop.finish_reason is not None:
                return min(accepted, i)
            self.tokens.append(token)
            chooser.push(token)
            found = None if logprobs is None else logprobs[i]
            text = self._stop.push(token, final=chooser.finished)
            self.events.append(Event(token, text, i < accepted, found))
            self._has_ended = self._stop.finish_reason is not None
        return accepted

    def evict(self) -> None:
        """It leaves its slot: what the session has seen of it is gone."""
        self.slot, self.fed, self.uncommitted = None, 0, 0
        self.watched = self.followed = False

    def end(self, reason: FinishReason) -> None:
        """End it from outside, if it has not ended; the text held back so far is shown."""
        if not self.finished:
            before = self._stop.finish_reason  # there is one if its last event was interrupted
            text = self._stop.cancel(reason) if before is None else StepText("", before)
            self.events.append(Event(None, text))
            self._has_ended = True
