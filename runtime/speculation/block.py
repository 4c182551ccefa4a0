# SPDX-License-Identifier: Apache-2.0
"""Drafts of block drafters: DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147).

A drafter conditions on the target's taps at committed positions, and proposes the tokens of a whole block in one step.
docs/drafters.md describes its graphs and a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Graph, Session, StepBatch
from nemo_build.runtime.speculation.base import Committed, Waiting, padded
from nemo_build.spec_draft import DraftSpec

_MOST_WAITING = 64
"""Positions of a sequence that may wait to be fed; taps are several hidden states wide."""


class BlockSpeculator:
    """Greedy drafts of a block drafter.

    Args:
        spec: The drafter.
        context: Its open graph that takes committed positions in.
        block: Its open graph that runs a block; shares the caches of `context`, and returns hidden states where the
            sequential head takes them.
        markov: Its open graph of the sequential head, if it has one.
    """

    features: str | None = "taps"

    def __init__(self, spec: DraftSpec, context: Graph, block: Session, markov: Graph | None) -> None:
        self._spec = spec
        self._context = context
        self._block = block
        self._markov = markov
        self._waiting: dict[int, Waiting] = {}
        self._newest: dict[int, int] = {}

    def observe(self, rows: Sequence[Committed]) -> None:
        """Keep the committed positions; see :class:`~nemo_build.runtime.speculation.base.Speculator`."""
        for row in rows:
            if row.past == 0:
                self._waiting[row.slot] = Waiting(0)
            self._waiting[row.slot].add(row)
            self._newest[row.slot] = row.tokens[-1]
        self._feed([r.slot for r in rows if len(self._waiting[r.slot].tokens) > _MOST_WAITING])

    def propose(self, slots: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts; see :class:`~nemo_build.runtime.speculation.base.Speculator`."""
        drafts: list[list[int]] = [[] for _ in slots]
        room = [self._block.context - (w.past + len(w.tokens)) - 1 for w in (self._waiting[s] for s in slots)]
        most = self._spec.max_drafted
        counts = [min(n, r, n if most is None else most) for n, r in zip(lengths, room, strict=True)]
        rows = [i for i, n in enumerate(counts) if n > 0]
        if not rows:
            return drafts
        self._feed([slots[i] for i in rows if self._waiting[slots[i]].tokens])
        first = 0 if self._spec.sample_from_anchor else 1
        batch = StepBatch.of_rows(
            [[self._newest[slots[i]], *[self._spec.mask_token_id] * (counts[i] - 1 + first)] for i in rows],
            past=[self._waiting[slots[i]].past for i in rows],
            slots=[slots[i] for i in rows],
            logits="none",
        )
        width = batch.input_ids.shape[1]
        wanted = np.concatenate([r * width + first + np.arange(counts[i]) for r, i in enumerate(rows)])
        output = self._block.step(batch.replace(logit_rows=wanted))
        hidden = None if output.hidden is None else output.hidden.reshape(-1, output.hidden.shape[-1])[wanted]
        start = 0
        for i in rows:
            part = slice(start, start + counts[i])
            drafts[i] = self._choose(
                output.logits[part], None if hidden is None else hidden[part], self._newest[slots[i]]
            )
            start += counts[i]
        return drafts

    def _choose(
        self, logits: NDArray[np.float32], hidden: NDArray[np.float32] | None, anchor: int
    ) -> list[int]:
        """Tokens of one block from its rows of logits: each on its own, or one after the other."""
        if self._markov is None:
            return [int(t) for t in logits.argmax(axis=-1)]
        chosen: list[int] = []
        for i, row in enumerate(logits):
            previous = np.array([chosen[-1] if chosen else anchor], np.int64)
            inputs = {"previous_ids": previous, "base_logits": row[None]}
            if hidden is not None:
                inputs["hidden"] = hidden[i][None]
            chosen.append(int(self._markov.run(inputs)["logits"][0].argmax()))
        return chosen

    def _feed(self, slots: Sequence[int]) -> None:
        """Take all that waits into the contexts of sequences."""
        if not slots:
            return
        taken = [self._waiting[s].take(len(self._waiting[s].tokens)) for s in slots]
        self._context.run(
            {
                "taps": padded([taps for _, _, taps in taken]),
                "lengths": np.array([len(tokens) for _, tokens, _ in taken], np.int64),
                "past": np.array([past for past, _, _ in taken], np.int64),
                "slots": np.array(slots, np.int64),
            }
        )
