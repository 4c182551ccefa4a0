# SPDX-License-Identifier: Apache-2.0
"""Drafts of block drafters: DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147).

A drafter conditions on the target's taps at committed positions, and proposes the tokens of a whole block in one step.
docs/drafters.md describes its graphs and a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Graph, Session, StepBatch, StepOutput
from nemo_build.runtime.speculation.base import (
    Committed,
    DraftRequest,
    Proposal,
    Speculator,
    Taken,
    Waiting,
    keep_short,
    padded,
)
from nemo_build.runtime.speculation.kind import EngineFiles
from nemo_build.spec_draft import DraftSpec
from nemo_build.state import StateSpec

_MOST_WAITING = 64
"""Positions of a sequence that may wait to be fed; taps are several hidden states wide."""


class BlockSpeculator:
    """Drafts of a block drafter; it implements :class:`~nemo_build.runtime.speculation.base.Speculator`.

    Args:
        spec: The drafter.
        context: Its open graph that takes committed positions in.
        block: Its open graph that runs a block; shares the caches of `context`, and returns hidden states where the
            sequential head takes them.
        markov: Its open graph of the sequential head, if it has one; returns ``logits``, and ``confidence`` where
            the drafter has a head for it.
    """

    features: str | None = "taps"

    def __init__(self, spec: DraftSpec, context: Graph, block: Session, markov: Graph | None) -> None:
        self._spec = spec
        self._context = context
        self._block = block
        self._markov = markov
        self.states: Sequence[StateSpec] = context.states
        self.lookahead: Mapping[str, int] = {}
        self._waiting: dict[int, Waiting] = {}

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The drafter's caches by buffer."""
        return self._context.state()

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        """Begin a sequence, behind as many rows of the caches as there are tokens."""
        self._waiting[slot] = Waiting(len(tokens))

    def observe(self, rows: Sequence[Committed]) -> None:
        """Keep the committed positions."""
        long = keep_short(self._waiting, rows, _MOST_WAITING)
        if long:
            self._feed(
                [row.slot for row in long], [self._waiting[row.slot].drain(row, keep=0) for row in long]
            )

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts by request: those of a block are chosen from left to right."""
        found = [Proposal([]) for _ in requests]
        counts = [self._count(r) for r in requests]
        rows = [i for i, n in enumerate(counts) if n > 0]
        if rows:
            wanted = [requests[i] for i in rows]
            self._catch_up([r.slot for r in wanted])
            drafts = self._draft(wanted, [counts[i] for i in rows])
            for i, proposal in zip(rows, drafts, strict=True):
                found[i] = proposal
        return found

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        """Take in all that waits; a row depends on its own position alone, so nothing else is needed."""
        self._catch_up([slot])
        return {}

    def release(self, slot: int) -> None:
        """Forget the sequence."""
        self._waiting.pop(slot, None)

    def _count(self, request: DraftRequest) -> int:
        """How many drafts a request can have: a block lies behind the context in the same slot."""
        room = self._block.context - self._waiting[request.slot].end - 1
        most = self._spec.max_drafted
        return min(request.length, room, request.length if most is None else most)

    def _draft(self, requests: Sequence[DraftRequest], counts: Sequence[int]) -> list[Proposal]:
        """Run a block for each request, and choose its tokens: for all requests the first, then the second..."""
        waiting = [self._waiting[r.slot] for r in requests]
        previous = [w.tokens[-1] for w in waiting]
        first = 0 if self._spec.sample_from_anchor else 1
        batch = StepBatch.of_rows(
            [
                [t] + [self._spec.mask_token_id] * (n - 1 + first)
                for t, n in zip(previous, counts, strict=True)
            ],
            past=[w.end for w in waiting],
            slots=[r.slot for r in requests],
            logits="none",
        )
        width = batch.input_ids.shape[1]
        active = [[i for i, n in enumerate(counts) if n > place] for place in range(max(counts))]
        # In this order, the rows of one place lie together.
        wanted = [i * width + first + place for place, rows in enumerate(active) for i in rows]
        output = self._block.step(batch.replace(logit_rows=np.array(wanted, np.int64)))
        drafts: list[list[int]] = [[] for _ in requests]
        confidence: list[list[float]] = [[] for _ in requests]
        start = 0
        for place, rows in enumerate(active):
            logits = output.logits[start : start + len(rows)]
            start += len(rows)
            if self._markov is not None:
                logits, likely = self._sequential(
                    logits, [previous[i] for i in rows], output, rows, first + place
                )
                for i, value in zip(rows, likely, strict=False):
                    confidence[i].append(value)
            for i, row in zip(rows, logits, strict=True):
                previous[i] = requests[i].choose(row)
                drafts[i].append(previous[i])
        says = self._spec.confidence
        return [
            Proposal(d, np.array(c, np.float32) if says else None)
            for d, c in zip(drafts, confidence, strict=True)
        ]

    def _sequential(
        self,
        base: NDArray[np.float32],
        previous: Sequence[int],
        output: StepOutput,
        rows: Sequence[int],
        column: int,
    ) -> tuple[NDArray[np.float32], list[float]]:
        """Logits ``[R, V]`` given the tokens before, and how confident the drafter is, where it says so."""
        assert self._markov is not None
        inputs: dict[str, NDArray[Any]] = {"previous_ids": np.array(previous, np.int64), "base_logits": base}
        if self._spec.confidence:
            assert output.hidden is not None, "the session was opened to return hidden states"
            inputs["hidden"] = output.hidden[rows, column]
        found = self._markov.run(inputs)
        return found["logits"], found["confidence"].tolist() if self._spec.confidence else []

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Take all that waits into the contexts of sequences."""
        behind = [s for s in slots if self._waiting[s].taken < self._waiting[s].end]
        if behind:
            self._feed(behind, [self._waiting[s].take(self._waiting[s].end) for s in behind])

    def _feed(self, slots: Sequence[int], taken: Sequence[Taken]) -> None:
        """Take positions that waited into the contexts of sequences."""
        self._context.run(
            {
                "taps": padded([taps for _, _, taps in taken]),
                "lengths": np.array([len(tokens) for _, tokens, _ in taken], np.int64),
                "past": np.array([past for past, _, _ in taken], np.int64),
                "slots": np.array(slots, np.int64),
            }
        )


def open_block(name: str, files: EngineFiles) -> Speculator:
    """The block drafter of this name that an engine has."""
    spec = DraftSpec.from_json(files.manifest["drafters"][name]["spec"])
    context = files.graph(f"{name}_context")
    block = files.session(name, state=context.state(), hidden=spec.confidence)
    outputs = ["logits", *["confidence"] * spec.confidence]
    markov = files.graph(f"{name}_markov", outputs=outputs) if spec.markov_rank else None
    return BlockSpeculator(spec, context, block, markov)
