# SPDX-License-Identifier: Apache-2.0
"""How a step becomes runs of a graph that takes so many tokens of a row at most.

A step's rows are sequences in any slots; in a run of a graph, row i is slot i. A run has as many rows as the highest of
its slots needs: slots below that which are not in it are rows without tokens. They cost what padding costs, which is
little beside reading the weights, while moving states to other slots would cost a copy of each. A scheduler that gives
out low slots first keeps the rows few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Index
from nemo_build.state import stays_pending


@dataclass(frozen=True)
class Rows:
    """A step's rows.

    Attributes:
        tokens: Inputs with a value for each new token, ``[B, L, …]``, by name.
        lengths: ``[B]`` valid tokens of each row.
        past: ``[B]`` tokens of the sequence before the new ones.
        accepted: ``[B]`` pending tokens of the slot to commit first.
        slots: ``[B]`` state slots.
        logit_rows: ``[R]`` rows of the flattened ``[B*L]`` whose logits are wanted.
    """

    tokens: Mapping[str, NDArray[Any]]
    lengths: Index
    past: Index
    accepted: Index
    slots: Index
    logit_rows: Index

    @property
    def width(self) -> int:
        """L."""
        return int(next(iter(self.tokens.values())).shape[1])


@dataclass(frozen=True)
class Run:
    """The part of a step that one run takes.

    Attributes:
        start: ``[B]``: tokens of each row that came before.
        take: ``[B]``: how many it takes.
        accepted: ``[B]``: pending tokens of each row that it commits first, of those that it takes anything of.
    """

    start: Index
    take: Index
    accepted: Index


@dataclass(frozen=True)
class Placed:
    """A run with its rows in their slots.

    Attributes:
        inputs: All inputs but the states, by name.
        slots: Which row each row of the step is, of those that take part.
        rows: Those rows of the step.
        logits: Which of the wanted logits the run gives; ``logit_rows`` of the inputs has a row for each.
    """

    inputs: dict[str, NDArray[Any]]
    slots: Index
    rows: Index
    logits: Index


def pieces(count: int, most: int, pending: int) -> list[int]:
    """Cut a row's new tokens so that a piece has `most` at most, and what is left pending is what it would be uncut.

    So the last piece of more tokens than may be pending is again more than those, or a single one, which is committed
    at once. Pieces before it may stay pending: the next one accepts all of them.

    Args:
        count: New tokens of the row.
        most: Tokens of a piece, at least 1.
        pending: Tokens that a step may leave uncommitted.
    """
    if count <= most:
        return [count] if count else []
    if most <= pending:
        rest = count - 1
        return [most] * (rest // most) + [rest % most] * (rest % most > 0) + [1]
    full, last = divmod(count, most)
    if last == 0:
        return [most] * full
    missing = pending + 1 - last if stays_pending(last, pending) else 0
    return [*[most] * (full - 1), most - missing, last + missing]


def split(run: Run, most: int, pending: int, room: int | None = None) -> Iterator[Run]:
    """Cut a run into smaller ones.

    Args:
        run: What to cut.
        most: Tokens of a row in a run.
        pending: Tokens that a step may leave uncommitted.
        room: Tokens of all rows in a run, at least `pending`; ``None``: any number.
    """
    longest = most if room is None else min(most, room)
    left = [pieces(n, longest, pending) for n in run.take.tolist()]
    start, accepted = run.start.copy(), run.accepted.copy()
    while any(left):
        take, free = np.zeros_like(start), room
        for row, parts in enumerate(left):
            if parts and (free is None or parts[0] <= free):
                take[row] = parts.pop(0)
                free = None if free is None else free - int(take[row])
        yield Run(start.copy(), take, accepted)
        start += take
        stays = [stays_pending(n, pending) for n in take.tolist()]
        accepted = np.where(take > 0, np.where(stays, take, 0), accepted)


def whole(rows: Rows) -> Run:
    """The run that takes all of a step."""
    return Run(np.zeros_like(rows.lengths), rows.lengths, rows.accepted)


def wanted(rows: Rows, run: Run) -> Index:
    """Which of a step's ``logit_rows`` are of tokens that a run takes, by their place in that list."""
    row, column = np.divmod(rows.logit_rows, rows.width)
    at = column - run.start[row]
    return np.flatnonzero((at >= 0) & (at < run.take[row]))


def arrange(rows: Rows, run: Run) -> Placed:
    """Put a run's rows into their slots. Its tokens are as wide as its longest row."""
    active = np.flatnonzero(run.take)
    slots = rows.slots[active]
    count, width = int(slots.max()) + 1, int(run.take.max())
    inputs: dict[str, NDArray[Any]] = {}
    for name, array in rows.tokens.items():
        placed = np.zeros((count, width, *array.shape[2:]), array.dtype)
        for row, slot in zip(active.tolist(), slots.tolist(), strict=True):
            start, take = int(run.start[row]), int(run.take[row])
            placed[slot, :take] = array[row, start : start + take]
        inputs[name] = placed
    numbers = {"lengths": run.take, "past": rows.past + run.start, "accepted": run.accepted}
    for name, values in numbers.items():
        inputs[name] = np.zeros(count, np.int64)
        inputs[name][slots] = values[active]
    logits = wanted(rows, run)
    at, column = np.divmod(rows.logit_rows[logits], rows.width)
    inputs["logit_rows"] = rows.slots[at] * width + column - run.start[at]
    return Placed(inputs, slots, active, logits)
