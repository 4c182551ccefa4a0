# SPDX-License-Identifier: Apache-2.0
"""A target and a drafter without a model: what follows is a function of the tokens, kept in buffers like a model's.

The recurrent state is a hash of the committed tokens, the cache holds the tokens by position, and logits depend on
both. So whatever a scheduler does wrong (a token skipped, fed twice, another's state, a stale row) changes what comes
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import StepBatch, StepOutput, check_batch
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request, Scheduling
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Proposal
from nemo_build.state import StateSpec, stays_pending

VOCABULARY = 40
END = 39
_TABLE = np.random.default_rng(0).normal(size=(1009, VOCABULARY)).astype(np.float32)
_TABLE[:, END] -= 3


def mix(state: int, token: int) -> int:
    """The hash of a sequence and one token more; below 2**20, so that float32 holds it."""
    return (state * 7919 + token * 104729 + 17) % 1048573


def hash_of(tokens: Sequence[int]) -> int:
    state = 1
    for token in tokens:
        state = mix(state, token)
    return state


def row_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """The logits after a sequence: by its hash, and by the sum of its tokens' squares."""
    return _TABLE[(hash_of(tokens) + sum(t * t for t in tokens)) % len(_TABLE)]


class ToySession:
    """A session; see :class:`nemo_build.engines.session.Session`.

    Args:
        slots: State slots.
        context: Positions per slot.
        pending: Tokens that a step may leave uncommitted.
        seconds: How long a step takes.
        hidden: Whether steps return hidden states, the hashes.
    """

    hidden_size = 1

    def __init__(
        self, slots: int, context: int = 256, pending: int = 0, *, seconds: float = 0.0, hidden: bool = False
    ) -> None:
        self.slots, self.context, self.pending = slots, context, pending
        self.isolated = True
        self.states = [
            StateSpec("ssm.toy", "ssm", ("slots", 2), "float32"),
            StateSpec("ssm_pending.toy", "ssm_pending", ("slots", "pending", 1), "float32"),
            StateSpec("key.toy", "key", ("slots", 1, "context", 1), "float32"),
        ]
        sizes = {"slots": slots, "context": context, "pending": pending}
        self._state = {s.name: np.full(s.resolve(sizes), np.nan, np.float32) for s in self.states}
        self._seconds, self._hidden = seconds, hidden
        self.steps: list[StepBatch] = []
        self.fails: Callable[[], bool] = bool

    def state(self) -> Mapping[str, NDArray[Any]]:
        return self._state

    def step(self, batch: StepBatch) -> StepOutput:
        check_batch(
            batch, slots=self.slots, context=self.context, pending=self.pending, vocabulary=VOCABULARY
        )
        if self.fails():
            raise RuntimeError("the device is gone")
        self.steps.append(batch)
        if self._seconds:
            time.sleep(self._seconds)
        rows, width = batch.input_ids.shape
        logits = np.full((rows * width, VOCABULARY), np.nan, np.float32)
        hidden = np.full((rows, width, 1), np.nan, np.float32)
        for i in range(rows):
            n, past, accepted = int(batch.lengths[i]), int(batch.past[i]), int(batch.accepted[i])
            slot, ids = int(batch.slots[i]), batch.input_ids[i, : int(batch.lengths[i])].tolist()
            state = self._advance(slot, past, accepted, ids)
            keys = self._state["key.toy"][slot, 0, :, 0]
            keys[past : past + n] = ids
            squares = int((keys[:past] ** 2).sum())
            for k, token in enumerate(ids):
                state, squares = mix(state, token), squares + token * token
                logits[i * width + k] = _TABLE[(state + squares) % len(_TABLE)]
                hidden[i, k] = state
        return StepOutput(logits[batch.logit_rows], hidden if self._hidden and not batch.lean else None)

    def _advance(self, slot: int, past: int, accepted: int, ids: list[int]) -> int:
        """Commit what was accepted, and the new tokens if they are too many to be pending; the state before those."""
        ring = self._state["ssm_pending.toy"][slot, :, 0]
        count, state = (0, 1) if past == accepted else map(int, self._state["ssm.toy"][slot])
        assert count == past - accepted, f"slot {slot} has {count} committed tokens, not {past} - {accepted}"
        for token in ring[:accepted].tolist():
            state = mix(state, int(token))
        before = state
        if stays_pending(len(ids), self.pending):
            self._state["ssm.toy"][slot] = past, state
            ring[: len(ids)] = ids
        else:
            for token in ids:
                state = mix(state, token)
            self._state["ssm.toy"][slot] = past + len(ids), state
        return before


class ToySpeculator:
    """Drafts that are right with a given probability, and a state that must follow the target's.

    Its cache has a row for each position that depends on the token after it, as that of MTP.

    Args:
        session: The target.
        right: How often a draft is right.
        confident: Whether it says how sure it is.
    """

    features: str | None = "hidden"
    lookahead = {"key.toy_drafter": 1}  # noqa: RUF012

    def __init__(self, session: ToySession, right: float, *, confident: bool = False) -> None:
        self.states = [StateSpec("key.toy_drafter", "key", ("slots", 1, "context", 1), "float32")]
        self._rows = np.full((session.slots, 1, session.context, 1), np.nan, np.float32)
        self._tokens: dict[int, list[int]] = {}
        self._right, self._confident = right, confident
        self._rng = np.random.default_rng(0)

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {"key.toy_drafter": self._rows}

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        assert slot not in self._tokens, "the sequence before has left the slot"
        self._tokens[slot] = list(tokens)
        if tokens:
            assert extra["hidden"] == hash_of(tokens)
            assert self._rows[slot, 0, : len(tokens) - 1, 0].tolist() == list(tokens[1:])

    def observe(self, rows: Sequence[Committed]) -> None:
        for row in rows:
            known = self._tokens[row.slot]
            assert row.past == len(known), "a gap, or something twice"
            assert row.features is not None
            assert len(row.features) == len(row.tokens) - 1
            if row.past:  # what follows the last restored token is known only now
                self._rows[row.slot, 0, row.past - 1, 0] = row.tokens[0]
            for token, following, feature in zip(
                row.tokens[:-1], row.tokens[1:], row.features[:, 0], strict=True
            ):
                known.append(token)
                assert feature == hash_of(known)
                self._rows[row.slot, 0, len(known) - 1, 0] = following

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = []
        for request in requests:
            known = list(self._tokens[request.slot])
            known.append(int(self._rows[request.slot, 0, len(known) - 1, 0]))
            drafts: list[int] = []
            sure = self._rng.random(request.length) < self._right
            for right in sure:
                logits = row_of(known + drafts)
                drafts.append(request.choose(logits) if right else int(self._rng.integers(VOCABULARY)))
            confidence = np.where(sure, 0.95, 0.05).astype(np.float32) if self._confident else None
            proposals.append(Proposal(drafts, confidence))
        return proposals

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        assert committed <= len(self._tokens[slot])
        return {"hidden": np.array(hash_of(self._tokens[slot][:committed]), np.float32)}

    def release(self, slot: int) -> None:
        del self._tokens[slot]


class ToyTable:
    """Tokens as text: one letter each."""

    special_ids = (END,)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([48 + token_id])


GREEDY = SamplingParams(max_tokens=12, temperature=0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request_of(prompt: Sequence[int], params: SamplingParams = GREEDY, **scheduling: Any) -> Request:
    return Request(
        prompt,
        params,
        eos_ids=(END,),
        table=ToyTable(),
        context=256,
        scheduling=Scheduling(**scheduling),
    )


def alone(prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    """What a request gets from a scheduler of its own."""
    scheduler, request = Scheduler(ToySession(1)), request_of(prompt, params)
    scheduler.add(request)
    run(scheduler)
    return request.output


def run(scheduler: Scheduler) -> None:
    while scheduler.unfinished:
        scheduler.step()


def prompt_of(rng: np.random.Generator, longest: int = 60) -> list[int]:
    return rng.integers(0, VOCABULARY - 1, int(rng.integers(1, longest))).tolist()
