# SPDX-License-Identifier: Apache-2.0
"""State buffers in a device's memory: which of two holds what, and how the host reads and writes them.

Some backends read a recurrent state from one buffer and write it to another. A run moves the first rows of all such
states from one to the other, so that slots behind them stay where they were: each slot has a side of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.gpu.device import Device, Region
from nemo_build.engines.gpu.executor import Binding
from nemo_build.state import CACHES, StateSpec

_DTYPES: Mapping[str, Any] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def portable(spec: StateSpec, pending: int, cache_rows: int) -> StateSpec:
    """The state of a lowered graph, whose sizes are numbers, as the portable graph declares it.

    Args:
        spec: The lowered state.
        pending: Tokens per slot that a step may leave uncommitted, which are part of its shape.
        cache_rows: Positions of a cache.
    """
    shape = list(spec.shape)
    if spec.kind == "conv":
        shape[1] = f"{int(shape[1]) - pending}+pending"
    elif spec.kind == "ssm_pending":
        shape[1] = "pending"
    elif spec.kind in CACHES:
        shape[shape.index(cache_rows, 2)] = "context"
    return replace(spec, shape=tuple(shape))


class StateBuffer:
    """The buffers of one state, one or two.

    Args:
        spec: The lowered state.
        slots: Its rows.
        sides: How many buffers there are.
        device: Where they are.
    """

    def __init__(self, spec: StateSpec, slots: int, sides: int, device: Device) -> None:
        self.spec = spec
        self.shape = spec.resolve({"slots": slots})
        self.dtype = _DTYPES[spec.dtype]
        self.row_bytes: int = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._memory = [device.allocate(slots * self.row_bytes) for _ in range(sides)]

    @property
    def sides(self) -> int:
        """How many buffers there are."""
        return len(self._memory)

    def address(self, slot: int, side: int) -> int:
        """Where a slot's state is, on a side if there are two."""
        return self._memory[side % self.sides].address + slot * self.row_bytes


class States:
    """The states of a graph.

    Args:
        specs: The lowered states.
        slots: Their rows.
        doubled: Kinds of state that are read and written in different buffers.
        device: Where they are.
        shared: Buffers of another graph that this one shares, by name; the others are its own.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        slots: int,
        doubled: Collection[str],
        device: Device,
        shared: Mapping[str, StateBuffer],
    ) -> None:
        self._device = device
        self.buffers = {
            s.name: shared[s.name]
            if s.name in shared
            else StateBuffer(s, slots, 1 + (s.kind in doubled), device)
            for s in specs
        }
        self._doubled = [b for b in self.buffers.values() if b.sides == 2]
        self._sides = [0] * slots

    def side_of(self, slot: int) -> int:
        """Which of two buffers holds a slot's state."""
        return self._sides[slot]

    def gather(self, rows: int) -> int:
        """Bring the states of the first `rows` slots to one side, which is returned; the fewest are copied."""
        if not self._doubled:
            return 0
        sides = self._sides[:rows]
        side = int(2 * sum(sides) > rows)
        for slot, other in enumerate(sides):
            if other != side:
                for buffer in self._doubled:
                    source = Region(buffer.address(slot, other), buffer.row_bytes)
                    self._device.move(source._replace(address=buffer.address(slot, side)), source)
                self._sides[slot] = side
        return side

    def advance(self, rows: int) -> None:
        """A run has written the states of the first `rows` slots to the other side."""
        if self._doubled:
            self._sides[:rows] = [1 - side for side in self._sides[:rows]]

    def bindings(self, rows: int, side: int) -> dict[str, Binding]:
        """Inputs and outputs of a run over the first `rows` slots, whose states are on one side."""
        found = {}
        for name, buffer in self.buffers.items():
            shape = (rows, *buffer.shape[1:])
            found[name] = Binding(buffer.address(0, side), shape, buffer.spec.dtype)
            found[buffer.spec.output] = Binding(buffer.address(0, 1 - side), shape, buffer.spec.dtype)
        return found


class BufferView:
    """A state as the host sees it: ``view[slot]`` is a slot's state, which can be cut, copied and written to.

    Args:
        buffer: The state.
        side_of: Which of two buffers holds a slot's state.
        device: Where it is.

    Attributes:
        buffer: As given.
        shape: ``[slots, …]``.
        dtype: NumPy's element type.
    """

    def __init__(self, buffer: StateBuffer, side_of: Callable[[int], int], device: Device) -> None:
        self.buffer, self.shape, self.dtype = buffer, buffer.shape, buffer.dtype
        self._side_of, self._device = side_of, device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, slot: int) -> SlotView:
        if not 0 <= slot < len(self):
            raise IndexError(f"slot {slot} is not within 0..{len(self) - 1} of {self.buffer.spec.name}")
        return SlotView(self, slot, tuple(range(n)[:] for n in self.shape[1:]))

    def read(self, slot: int, ranges: Sequence[range]) -> NDArray[Any]:
        """Copy a part of a slot's state from the device."""
        found = np.empty([len(r) for r in ranges], self.dtype)
        with self._device.lock:
            self._device.activate()
            if found.size:
                self._device.read(found, self._region(slot, ranges))
                self._device.synchronize()
        return found

    def write(self, slot: int, ranges: Sequence[range], values: NDArray[Any]) -> None:
        """Copy a part of a slot's state to the device."""
        shape = [len(r) for r in ranges]
        source = np.ascontiguousarray(np.broadcast_to(np.asarray(values, self.dtype), shape))
        with self._device.lock:
            self._device.activate()
            if source.size:
                self._device.write(self._region(slot, ranges), source)
                self._device.synchronize()

    def _region(self, slot: int, ranges: Sequence[range]) -> Region:
        """Where a part is. One axis of it may be cut; a strided copy does not do more."""
        shape = self.shape[1:]
        cut = [axis for axis, (r, n) in enumerate(zip(ranges, shape, strict=True)) if len(r) < n]
        if len(cut) > 1:
            raise IndexError(f"more than one axis of {self.buffer.spec.name} is cut")
        axis = cut[0] if cut else 0
        inner = math.prod(shape[axis + 1 :]) * self.dtype.itemsize
        start = self.buffer.address(slot, self._side_of(slot)) + ranges[axis].start * inner
        return Region(start, len(ranges[axis]) * inner, math.prod(shape[:axis]), shape[axis] * inner)


class SlotView:
    """Part of a slot's state; see :class:`BufferView`."""

    def __init__(self, view: BufferView, slot: int, ranges: tuple[range, ...]) -> None:
        self._view, self._slot, self._ranges = view, slot, ranges

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return tuple(map(len, self._ranges))

    def __getitem__(self, index: slice | tuple[slice, ...]) -> SlotView:
        return SlotView(self._view, self._slot, self._cut(index))

    def __setitem__(self, index: slice | tuple[slice, ...] | Any, values: NDArray[Any]) -> None:
        self._view.write(self._slot, self._ranges if index is ... else self._cut(index), values)

    def copy(self) -> NDArray[Any]:
        """Its values, in memory of the host."""
        return self._view.read(self._slot, self._ranges)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = self.copy()
        return values if dtype is None else values.astype(dtype)

    def _cut(self, index: slice | tuple[slice, ...]) -> tuple[range, ...]:
        slices = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(s, slice) and s.step in (None, 1) for s in slices):
            raise IndexError("a slot's state is cut by slices without steps")
        kept = self._ranges[len(slices) :]
        return (*(r[s] for r, s in zip(self._ranges, slices, strict=False)), *kept)
