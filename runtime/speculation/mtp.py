# SPDX-License-Identifier: Apache-2.0
"""Drafts from the checkpoint's multi-token-prediction module.

The module takes the token after a position with the hidden state of that position, and predicts the token after
that (DeepSeek-V3, arXiv:2412.19437, section 2.2). Over committed positions it is fed the target's hidden states, so
that its cache is dense and exact; from there on its own, one token at a time. What it wrote while drafting is
overwritten when the positions are committed, because it writes by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch, StepOutput
from nemo_build.runtime.speculation.base import (
    Committed,
    DraftRequest,
    Proposal,
    Taken,
    Waiting,
    keep_short,
    padded,
)
from nemo_build.state import StateSpec

_MOST_WAITING = 256
"""Positions of a sequence that may wait to be fed; hidden states of as many are kept."""


class MtpSpeculator:
    """Drafts of the MTP module; it implements :class:`~nemo_build.runtime.speculation.base.Speculator`.

    Args:
        session: The open ``mtp`` graph, with as many slots and positions as the target's session.

    Attributes:
        session: As given.
    """

    features: str | None = "hidden"

    def __init__(self, session: Session) -> None:
        self.session = session
        self.states: Sequence[StateSpec] = session.states
        self.lookahead: Mapping[str, int] = {s.name: 1 for s in session.states}
        self._waiting: dict[int, Waiting] = {}
        self._ones = np.ones(session.slots, np.int64)
        self._zeros = np.zeros(session.slots, np.int64)
        self._range = np.arange(session.slots)

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The module's cache by buffer."""
        return self.session.state()

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        """Begin a sequence. Behind n tokens the cache has n - 1 rows: the last waits for the token after it."""
        if not tokens:
            self._waiting[slot] = Waiting(0)
            return
        hidden = extra.get("hidden")
        if hidden is None:
            # A prefix that nobody saved at its end; one row that is wrong costs acceptance, no more.
            hidden = np.zeros(self.session.hidden_size, np.float32)
        self._waiting[slot] = Waiting(len(tokens) - 1, hidden[None])

    def observe(self, rows: Sequence[Committed]) -> None:
        """Keep the committed positions."""
        long = keep_short(self._waiting, rows, _MOST_WAITING)
        if long:  # all but the last position, from which the next draft starts
            taken = [self._waiting[row.slot].drain(row, keep=1) for row in long]
            self._feed([row.slot for row in long], taken, logits="none")

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts by request; each is chosen before the module takes it to predict the next."""
        if not requests:
            return []
        waiting = [self._waiting[r.slot] for r in requests]
        for w in waiting:
            w.taken = min(w.taken, w.end - 1)  # also where nothing was committed since the last time
        slots, ends = [r.slot for r in requests], [w.end for w in waiting]
        lengths = [min(r.length, self.session.context - n + 1) for r, n in zip(requests, ends, strict=True)]
        output, hidden = self._feed(slots, [w.take(w.end) for w in waiting], logits="last")
        drafts: list[list[int]] = [[] for _ in requests]
        chains = list(range(len(requests)))  # those that go on
        step = self._chain(slots, ends)
        while True:
            for i, logits in zip(chains, output.logits, strict=True):
                drafts[i].append(requests[i].choose(logits))
            rows = [row for row, i in enumerate(chains) if len(drafts[i]) < lengths[i]]
            if not rows:
                return [Proposal(d) for d in drafts]
            if len(rows) < len(chains):
                chains, hidden = [chains[row] for row in rows], hidden[rows]
                step = self._chain([slots[i] for i in chains], step.past[rows])
            step.input_ids[:, 0] = [drafts[i][-1] for i in chains]
            output = self.session.step(step.replace(hidden_in=hidden))
            assert output.hidden is not None, "the session was opened to return hidden states"
            hidden = output.hidden
            step.past[:] += 1

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        """Feed the rows of all but the last committed token, and return the target's hidden state at that."""
        if committed == 0:
            return {}
        waiting = self._waiting[slot]
        hidden = waiting.at(committed - 1)
        if waiting.taken < committed - 1:
            self._feed([slot], [waiting.take(committed - 1)], logits="none")
        return {"hidden": hidden}

    def release(self, slot: int) -> None:
        """Forget the sequence."""
        self._waiting.pop(slot, None)

    def _chain(self, slots: Sequence[int], past: Sequence[int] | NDArray[np.int64]) -> StepBatch:
        """A step of one token a row; its tokens and hidden states are still to be filled in.

        All steps of a chain are this one with other numbers, written in place: what does not change is bound once.
        """
        count = len(slots)
        return StepBatch(
            input_ids=np.zeros((count, 1), np.int64),
            lengths=self._ones[:count],
            past=np.array(past, np.int64),
            accepted=self._zeros[:count],
            slots=np.array(slots, np.int64),
            logit_rows=self._range[:count],
        )

    def _feed(
        self,
        slots: Sequence[int],
        taken: Sequence[Taken],
        *,
        logits: str,
    ) -> tuple[StepOutput, NDArray[np.float32]]:
        """Feed positions that waited; also the hidden state ``[rows, 1, H]`` of each row's last one."""
        past, tokens, hidden = zip(*taken, strict=True)
        batch = StepBatch.of_rows(tokens, past=past, slots=slots, logits=logits, hidden_in=padded(hidden))
        output = self.session.step(batch)
        assert output.hidden is not None, "the session was opened to return hidden states"
        if batch.input_ids.shape[1] == 1:
            return output, output.hidden
        return output, output.hidden[self._range[: len(taken)], batch.lengths - 1][:, None]
