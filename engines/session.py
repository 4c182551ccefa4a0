# SPDX-License-Identifier: Apache-2.0
"""What a backend implements: one step of one graph over a batch of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_build.state import StateSpec

Index = NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """One step's input. Rows are independent sequences; token columns past a row's length are padding.

    Attributes:
        input_ids: ``[B, L]`` new tokens.
        lengths: ``[B]`` valid tokens of each row.
        past: ``[B]`` tokens of the sequence before the new ones.
        accepted: ``[B]`` pending tokens of the slot to commit first.
        slots: ``[B]`` state slots, distinct among rows with a length above 0.
        logit_rows: ``[R]`` rows of the flattened ``[B*L]`` whose logits are wanted.
        hidden_in: ``[B, L, H]`` float32; only for graphs that take hidden states.
    """

    input_ids: Index
    lengths: Index
    past: Index
    accepted: Index
    slots: Index
    logit_rows: Index
    hidden_in: NDArray[np.float32] | None = None

    @classmethod
    def of_rows(
        cls,
        tokens: Sequence[Sequence[int]],
        *,
        past: Sequence[int],
        slots: Sequence[int],
        accepted: Sequence[int] | None = None,
        logits: str = "last",
    ) -> StepBatch:
        """Pad rows of tokens to a batch.

        Args:
            tokens: New tokens of each row.
            past: As the attribute.
            slots: As the attribute.
            accepted: As the attribute; default zeros.
            logits: ``last`` (of every row), ``all`` valid tokens, or ``none``.
        """
        lengths = np.array([len(t) for t in tokens], np.int64)
        width = max(int(lengths.max()), 1)
        ids = np.zeros((len(tokens), width), np.int64)
        for row, t in zip(ids, tokens, strict=True):
            row[: len(t)] = t
        starts = np.arange(len(tokens)) * width
        if logits == "last":
            rows = (starts + lengths - 1)[lengths > 0]
        elif logits == "all":
            rows = np.flatnonzero(np.arange(width) < lengths[:, None])
        else:
            rows = np.empty(0, np.int64)
        return cls(
            ids,
            lengths,
            np.array(past, np.int64),
            np.zeros(len(tokens), np.int64) if accepted is None else np.array(accepted, np.int64),
            np.array(slots, np.int64),
            rows.astype(np.int64),
        )

    def replace(self, **changes: Any) -> StepBatch:
        """A copy with other values of some attributes."""
        return replace(self, **changes)


@dataclass(frozen=True)
class StepOutput:
    """One step's output.

    Attributes:
        logits: ``[R, V]`` float32, one row for each entry of ``logit_rows``.
        hidden: ``[B, L, H]`` float32 final hidden states, if the session was opened to return them.
        taps: ``[B, L, n*H]`` float32 residuals that drafters condition on, likewise.
    """

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32] | None = None
    taps: NDArray[np.float32] | None = None


class Graph(Protocol):
    """An open graph with its state buffers."""

    slots: int
    context: int
    pending: int
    hidden_size: int
    states: list[StateSpec]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
        """Run it on host arrays, all inputs but the state buffers; returns the outputs it was opened for."""
        ...

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name, as views."""
        ...


class Session(Graph, Protocol):
    """An open step graph."""

    def step(self, batch: StepBatch) -> StepOutput:
        """Run one step; the state of the rows' slots advances.

        Raises:
            ValueError: The batch contradicts itself or the session's sizes.
        """
        ...


def check_batch(batch: StepBatch, *, slots: int, context: int, pending: int, vocabulary: int) -> None:
    """Raise ValueError if a batch would make a graph read or write outside its buffers."""
    rows, steps = batch.input_ids.shape
    if rows == 0 or steps == 0:
        raise ValueError("a step needs at least one row and one column")
    for name in ("lengths", "past", "accepted", "slots"):
        if getattr(batch, name).shape != (rows,):
            raise ValueError(f"{name} has shape {getattr(batch, name).shape}, expected ({rows},)")
    active = batch.lengths > 0
    used = batch.slots[active]
    if len(np.unique(used)) != len(used):
        raise ValueError(f"rows share a state slot: {used.tolist()}")
    if (batch.slots < 0).any() or (batch.slots >= slots).any():
        raise ValueError(f"slots {batch.slots.tolist()} are not all within 0..{slots - 1}")
    if (batch.lengths < 0).any() or (batch.lengths > steps).any():
        raise ValueError(f"lengths {batch.lengths.tolist()} are not all within 0..{steps}")
    if (batch.past < 0).any() or (batch.past + batch.lengths > context).any():
        raise ValueError(f"a row's past is negative, or it grows past the context of {context} positions")
    accepted = batch.accepted
    if (accepted < 0).any() or (accepted > pending).any() or (accepted > batch.past).any():
        raise ValueError(f"accepted {accepted.tolist()} exceeds the {pending} pending tokens or the past")
    if (batch.input_ids < 0).any() or (batch.input_ids >= vocabulary).any():
        raise ValueError(f"token ids are not all within 0..{vocabulary - 1}")
    if (batch.logit_rows < 0).any() or (batch.logit_rows >= rows * steps).any():
        raise ValueError(f"logit_rows {batch.logit_rows.tolist()} are not all within 0..{rows * steps - 1}")
