# SPDX-License-Identifier: Apache-2.0
"""Drafts from the checkpoint's multi-token-prediction module.

The module takes the token after a position with the hidden state of that position, and predicts the token after
that (DeepSeek-V3, arXiv:2412.19437, section 2.2). Over committed positions it is fed the target's hidden states, so
that its cache is dense and exact; from there on its own, one token at a time. What it wrote while drafting is
overwritten when the positions are committed, because it writes by position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch
from nemo_build.runtime.speculation.base import Committed, Waiting, padded

_MOST_WAITING = 256
"""Positions of a sequence that may wait to be fed; hidden states of as many are kept."""


class MtpSpeculator:
    """Greedy drafts of the MTP module.

    Args:
        session: The open ``mtp`` graph, with as many slots and positions as the target's session.
    """

    features: str | None = "hidden"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: dict[int, Waiting] = {}

    def observe(self, rows: Sequence[Committed]) -> None:
        """Keep the committed positions; see :class:`~nemo_build.runtime.speculation.base.Speculator`."""
        long = []
        for row in rows:
            if row.past == 0:
                self._waiting[row.slot] = Waiting(0)
            waiting = self._waiting[row.slot]
            waiting.add(row)
            if len(waiting.tokens) > _MOST_WAITING:
                long.append(row.slot)
        if long:  # all but the last position, from which the next draft starts
            self._feed(long, [len(self._waiting[s].tokens) - 1 for s in long], logits=False)

    def propose(self, slots: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts; see :class:`~nemo_build.runtime.speculation.base.Speculator`."""
        drafts: list[list[int]] = [[] for _ in slots]
        rows = [i for i, n in enumerate(lengths) if n > 0]
        if not rows:
            return drafts
        counts = [len(self._waiting[slots[i]].tokens) for i in rows]
        found = self._feed([slots[i] for i in rows], counts, logits=True)
        past = {i: self._waiting[slots[i]].past for i in rows}
        while True:
            hidden = {}
            for i, (token, state) in zip(rows, found, strict=True):
                drafts[i].append(token)
                hidden[i] = state
            rows = [i for i in rows if lengths[i] > len(drafts[i])]
            if not rows:
                return drafts
            found = self._step(
                [[drafts[i][-1]] for i in rows],
                [past[i] + len(drafts[i]) - 1 for i in rows],
                [slots[i] for i in rows],
                [hidden[i][None] for i in rows],
                logits=True,
            )

    def _feed(
        self, slots: Sequence[int], counts: Sequence[int], *, logits: bool
    ) -> list[tuple[int, NDArray[np.float32]]]:
        """Feed the module positions that wait."""
        taken = [self._waiting[s].take(n) for s, n in zip(slots, counts, strict=True)]
        past, tokens, hidden = zip(*taken, strict=True)
        return self._step(tokens, past, slots, hidden, logits=logits)

    def _step(
        self,
        tokens: Sequence[Sequence[int]],
        past: Sequence[int],
        slots: Sequence[int],
        hidden: Sequence[NDArray[np.float32]],
        *,
        logits: bool,
    ) -> list[tuple[int, NDArray[np.float32]]]:
        """One step: with `logits`, each row's most likely next token and the hidden state of its last one."""
        batch = StepBatch.of_rows(tokens, past=past, slots=slots, logits="last" if logits else "none")
        output = self._session.step(batch.replace(hidden_in=padded(hidden)))
        assert output.hidden is not None, "the session was opened to return hidden states"
        states = [output.hidden[i, len(t) - 1].copy() for i, t in enumerate(tokens)]
        return list(zip(output.logits.argmax(axis=-1).tolist(), states, strict=False))
