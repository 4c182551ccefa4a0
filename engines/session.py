# SPDX-License-Identifier: Apache-2.0
"""What a backend implements: one step of one graph over a batch of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, gt
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
        lean: Whether nothing but the logits is wanted.
    """

    input_ids: Index
    lengths: Index
    past: Index
    accepted: Index
    slots: Index
    logit_rows: Index
    hidden_in: NDArray[np.float32] | None = None
    lean: bool = False

    @classmethod
    def of_rows(
        cls,
        tokens: Sequence[Sequence[int]],
        *,
        past: Sequence[int],
        slots: Sequence[int],
        accepted: Sequence[int] | None = None,
        logits: str = "last",
        hidden_in: NDArray[np.float32] | None = None,
    ) -> StepBatch:
        """Pad rows of tokens to a batch.

        Args:
            tokens: New tokens of each row.
            past: As the attribute.
            slots: As the attribute.
            accepted: As the attribute; default zeros.
            logits: ``last`` (of every row), ``all`` valid tokens, or ``none``.
            hidden_in: As the attribute.
        """
        lengths = [len(t) for t in tokens]
        width = max(*lengths, 1)
        if min(lengths) == width:
            ids = np.array(tokens, np.int64)
        else:
            ids = np.zeros((len(tokens), width), np.int64)
            for row, t in zip(ids, tokens, strict=True):
                row[: len(t)] = t
        if logits == "last":
            rows = [i * width + n - 1 for i, n in enumerate(lengths) if n > 0]
        elif logits == "all":
            rows = [r for i, n in enumerate(lengths) for r in range(i * width, i * width + n)]
        else:
            rows = []
        return cls(
            ids,
            np.array(lengths, np.int64),
            np.array(past, np.int64),
            np.zeros(len(tokens), np.int64) if accepted is None else np.array(accepted, np.int64),
            np.array(slots, np.int64),
            np.array(rows, np.int64),
            hidden_in,
        )

    def replace(self, **changes: Any) -> StepBatch:
        """A copy with other values of some attributes."""
        return replace(self, **changes)


@dataclass(frozen=True)
class StepOutput:
    """One step's output.

    Attributes:
        logits: ``[R, V]`` float32, one row for each entry of ``logit_rows``.
        hidden: ``[B, L, H]`` float32 final hidden states, if the session was opened to return them and the step was
            not lean.
        taps: ``[B, L, n*H]`` float32 residuals that drafters condition on, likewise.
    """

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32] | None = None
    taps: NDArray[np.float32] | None = None


class Slots(Protocol):
    """State buffers with a slot for each sequence, wherever what advances them is.

    Attributes:
        slots: State slots.
        context: Positions per slot.
        pending: Tokens per slot that a step may leave uncommitted.
        isolated: Whether a run leaves the state of slots that are not in it alone, so that others may read and write
            it meanwhile.
    """

    slots: int
    context: int
    pending: int
    isolated: bool

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name, as views."""
        ...


class Graph(Slots, Protocol):
    """An open graph with its state buffers.

    Attributes:
        hidden_size: Width of the residual stream.
        states: The state buffers.
    """

    hidden_size: int
    states: list[StateSpec]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
        """Run it on host arrays, all inputs but the state buffers; returns the outputs it was opened for."""
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
    # Rows are few: lists are faster than arrays.
    lengths, past, accepted = batch.lengths.tolist(), batch.past.tolist(), batch.accepted.tolist()
    row_slots = batch.slots.tolist()
    used = [s for s, n in zip(row_slots, lengths, strict=True) if n > 0]
    if len(set(used)) != len(used):
        raise ValueError(f"rows share a state slot: {used}")
    if min(row_slots) < 0 or max(row_slots) >= slots:
        raise ValueError(f"slots {row_slots} are not all within 0..{slots - 1}")
    if min(lengths) < 0 or max(lengths) > steps:
        raise ValueError(f"lengths {lengths} are not all within 0..{steps}")
    if min(past) < 0 or max(map(add, past, lengths)) > context:
        raise ValueError(f"a row's past is negative, or it grows past the context of {context} positions")
    if min(accepted) < 0 or max(accepted) > pending or any(map(gt, accepted, past)):
        raise ValueError(f"accepted {accepted} exceeds the {pending} pending tokens or the past")
    if not _all_below(batch.input_ids, vocabulary):
        raise ValueError(f"token ids are not all within 0..{vocabulary - 1}")
    if not _all_below(batch.logit_rows, rows * steps):
        raise ValueError(f"logit_rows {batch.logit_rows.tolist()} are not all within 0..{rows * steps - 1}")


_FEW = 64
"""Numbers up to which a list is faster than an array."""


def _all_below(numbers: Index, end: int) -> bool:
    """Whether all numbers are within 0..end - 1."""
    if numbers.size > _FEW:
        return bool(numbers.min() >= 0 and numbers.max() < end)
    values = numbers.ravel().tolist()
    return not values or (min(values) >= 0 and max(values) < end)
