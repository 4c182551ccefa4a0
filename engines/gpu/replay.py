# SPDX-License-Identifier: Apache-2.0
"""Runs of one shape: where their inputs and outputs lie, and how a shape that is met again is replayed.

All that a run needs of the host is copied to one place of the device in one piece, so that a run of the same shape has
the same addresses again and can be a captured graph.
"""

from __future__ import annotations

import ctypes
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.gpu.device import ALIGNMENT, CaptureError, Device, Region
from nemo_build.engines.gpu.executor import Binding, Executor

Shapes = Sequence[tuple[str, tuple[int, ...], Any]]
"""Tensors by name, shape and NumPy's element type."""

_MOST_FRAMES = 256
_MOST_BLOCKS = 4


@dataclass
class Frame:
    """A shape of a run.

    Attributes:
        outputs: Where its outputs are.
        bindings: What the executor is given: inputs, outputs and states.
        inputs: Arrays of the host that a run's inputs are put into.
        staged: Where they go, and the bytes of the host that all of them lie in; ``None``: they are on the device.
    """

    outputs: Mapping[str, Binding]
    bindings: Mapping[str, Binding]
    inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    staged: tuple[Region, NDArray[Any]] | None = None
    runs: int = 0
    recording: Callable[[], None] | None = field(default=None, repr=False)


class Staging:
    """Memory of the device, and as much of the host, in which the inputs of any shape have a place.

    Args:
        device: Where.
        capacity: Bytes of the largest shape.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._memory, self._host = device.allocate(capacity), device.host_array(capacity)

    def place(
        self, tensors: Shapes
    ) -> tuple[dict[str, Binding], dict[str, NDArray[Any]], tuple[Region, NDArray[Any]]]:
        """Where tensors are on the device and on the host, and the places of all of them in one piece."""
        bindings = bind(tensors, self._memory.address)
        arrays, start = {}, 0
        for name, shape, dtype in tensors:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = self._host[start : start + nbytes].view(dtype).reshape(shape)
            start += padded(nbytes)
        return bindings, arrays, (Region(self._memory.address, start), self._host[:start])


class HostBlocks:
    """Memory of the host that results are copied to. It is used again when nobody refers to what was handed out.

    Args:
        device: Where results come from.
        nbytes: Bytes of a block.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0

    def take(self) -> NDArray[np.uint8]:
        """A block. It is ordinary memory, to which copies are slower, for those who keep many."""
        if self._free:
            block = self._free.pop()
        elif self._made < _MOST_BLOCKS:
            self._made += 1
            block = self._device.host_array(self._nbytes)
        else:
            return np.empty(self._nbytes, np.uint8)
        lease = (ctypes.c_ubyte * self._nbytes).from_address(block.ctypes.data)
        weakref.finalize(lease, self._free.append, block).atexit = False
        return np.ctypeslib.as_array(lease)


class Frames:
    """The shapes that were met, and their runs.

    Args:
        device: Where they run.
        blocks: Where results are copied to.
    """

    def __init__(self, device: Device, blocks: HostBlocks) -> None:
        self._device, self._blocks = device, blocks
        self._frames: OrderedDict[Any, Frame] = OrderedDict()
        self._captures = True

    def get(self, key: Any, make: Callable[[], Frame]) -> Frame:
        """The frame of a shape. The one met last longest ago is forgotten for it, if they are many."""
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = make()
            if len(self._frames) > _MOST_FRAMES:
                self._frames.popitem(last=False)
        self._frames.move_to_end(key)
        return frame

    def run(self, executor: Executor, frame: Frame, wanted: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        """Launch a run, copy outputs back, and wait.

        Args:
            executor: What runs it.
            frame: Its inputs are in their places.
            wanted: How many of the first entries of which outputs are copied.
        """
        self.launch(executor, frame)
        found, block, start = {}, self._blocks.take(), 0
        for name, count in wanted.items():
            address, (_, *rest), dtype = frame.outputs[name]
            nbytes = count * math.prod(rest) * np.dtype(dtype).itemsize
            found[name] = block[start : start + nbytes].view(dtype).reshape(count, *rest)
            if nbytes:
                self._device.read(found[name], Region(address, nbytes))
            start += padded(nbytes)
        self._device.synchronize()
        return found

    def launch(self, executor: Executor, frame: Frame) -> None:
        """Enqueue a run and the copy of its inputs, if they come from the host.

        A shape that is met for the second time is captured behind its run, when the library has no more to prepare for
        it; from the third time on it is replayed.
        """
        if frame.staged is not None:
            self._device.write(*frame.staged)
        frame.runs += 1
        if frame.recording is not None:
            frame.recording()
            return
        executor.run(frame.bindings, self._device.stream)
        if frame.runs > 1 and self._captures and executor.capturable:
            frame.recording = self._capture(executor, frame)

    def _capture(self, executor: Executor, frame: Frame) -> Callable[[], None] | None:
        try:
            return self._device.capture(lambda: executor.run(frame.bindings, self._device.stream))
        except CaptureError as error:
            self._captures = False
            warnings.warn(f"Steps are not captured as CUDA graphs, which costs time: {error}", stacklevel=2)
            return None


def bind(tensors: Shapes, address: int) -> dict[str, Binding]:
    """Give tensors places one after the other."""
    found = {}
    for name, shape, dtype in tensors:
        found[name] = Binding(address, shape, np.dtype(dtype).name)
        address += padded(math.prod(shape) * np.dtype(dtype).itemsize)
    return found


def padded(nbytes: int) -> int:
    """Bytes up to the next tensor."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
