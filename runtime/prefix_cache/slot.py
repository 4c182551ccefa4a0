# SPDX-License-Identifier: Apache-2.0
"""What of a slot's buffers belongs to which tokens: reading, writing, counting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.state import ITEM_SIZE, StateSpec

Array = NDArray[Any]
Buffers = Mapping[str, Array]
"""State buffers by name, each ``[slots, …]``, as :meth:`~nemo_build.engines.session.Session.state` returns them."""

TOKEN = np.dtype(np.int32)


@dataclass(frozen=True)
class _Rows:
    """A buffer with positions: their axis in a slot, the bytes of one, and how far ahead one depends on tokens."""

    name: str
    axis: int
    nbytes: int
    lookahead: int

    def count(self, tokens: int) -> int:
        """Rows that depend on the first `tokens` tokens alone."""
        return max(tokens - self.lookahead, 0)

    def of(self, state: Buffers, slot: int, start: int, end: int) -> Array:
        """The rows that tokens `start` to `end` complete, as a view."""
        rows = slice(self.count(start), self.count(end))
        view: Array = state[self.name][slot][(*[slice(None)] * self.axis, rows)]
        return view


@dataclass(frozen=True)
class _Fixed:
    """A buffer without positions: the shape of a slot's committed part, which comes before what is pending."""

    name: str
    shape: tuple[int, ...]
    nbytes: int

    def of(self, state: Buffers, slot: int) -> Array:
        """That part as a view."""
        view: Array = state[self.name][slot][tuple(slice(n) for n in self.shape)]
        return view


class SlotLayout:
    """The buffers of a slot.

    Args:
        states: The buffers of all graphs that a slot has state in.
        lookahead: For buffers whose row at a position depends on tokens after it: on how many.

    Raises:
        ValueError: `lookahead` is negative or names a buffer without positions.

    Attributes:
        recurrent: Whether there is state that is not rows.
        snapshot_bytes: Bytes of that state.
    """

    def __init__(self, states: Iterable[StateSpec], lookahead: Mapping[str, int]) -> None:
        self._rows: list[_Rows] = []
        self._fixed: list[_Fixed] = []
        for spec in states:
            shape = spec.resolve({"slots": 1, "pending": 0, "context": 1})
            nbytes = math.prod(shape) * ITEM_SIZE[spec.dtype]
            if "context" in spec.shape:
                axis = spec.shape.index("context") - 1
                self._rows.append(_Rows(spec.name, axis, nbytes, lookahead.get(spec.name, 0)))
            elif nbytes:  # rings of pending tokens have nothing that is committed
                self._fixed.append(_Fixed(spec.name, shape[1:], nbytes))
        if set(lookahead) - {r.name for r in self._rows} or any(n < 0 for n in lookahead.values()):
            raise ValueError(f"lookahead {dict(lookahead)} is negative or of buffers without positions")
        self.recurrent = bool(self._fixed)
        self.snapshot_bytes = sum(f.nbytes for f in self._fixed)

    def block_bytes(self, start: int, end: int) -> int:
        """Bytes of the rows that tokens `start` to `end` complete, and of the tokens."""
        rows = sum((r.count(end) - r.count(start)) * r.nbytes for r in self._rows)
        return rows + (end - start) * TOKEN.itemsize

    def copy_rows(self, state: Buffers, slot: int, start: int, end: int) -> list[Array]:
        """Copy the rows that tokens `start` to `end` complete: one array a buffer."""
        return [r.of(state, slot, start, end).copy() for r in self._rows]

    def write_rows(self, rows: Sequence[Array], state: Buffers, slot: int, start: int, end: int) -> None:
        """The inverse of :meth:`copy_rows`."""
        for r, array in zip(self._rows, rows, strict=True):
            r.of(state, slot, start, end)[...] = array

    def copy_fixed(self, state: Buffers, slot: int) -> list[Array]:
        """Copy the committed state that is not rows: one array a buffer."""
        return [f.of(state, slot).copy() for f in self._fixed]

    def write_fixed(self, arrays: Sequence[Array], state: Buffers, slot: int) -> None:
        """The inverse of :meth:`copy_fixed`."""
        for f, array in zip(self._fixed, arrays, strict=True):
            f.of(state, slot)[...] = array

    def check(self, state: Buffers, slot: int, tokens: int) -> None:
        """Raise ValueError if the state has no such slot, or not all that `tokens` tokens take."""
        for name in [r.name for r in self._rows] + [f.name for f in self._fixed]:
            if name not in state:
                raise ValueError(f"the state has no buffer {name!r}")
            if not 0 <= slot < len(state[name]):
                raise ValueError(f"slot {slot} is not within 0..{len(state[name]) - 1} of {name!r}")
        for r in self._rows:
            context = state[r.name].shape[1 + r.axis]
            if r.count(tokens) > context:
                raise ValueError(f"{tokens} tokens exceed the {context} positions of {r.name!r}")
