# SPDX-License-Identifier: Apache-2.0
"""What stands in for a GPU: a device in memory of the host, and ONNX Runtime in place of compiled graphs.

The device does nothing until it is waited for, so that what reads a result too early reads something else.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest, write_manifest
from nemo_build.engines.backends import OnGpu
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.gpu.device import CaptureError, Memory, Region
from nemo_build.engines.gpu.executor import Binding
from nemo_build.engines.gpu.opening import GpuBackend
from nemo_build.engines.trt.lowering import OVERFLOW
from nemo_build.engines.trt.phases import DECODE, PREFILL, phases_of
from nemo_build.errors import PlanError
from nemo_build.state import RECURRENT

from .tensorrt_rtx_runner import LoweredGraph


class HostDevice:
    """A device whose addresses are the host's; work waits in a queue for :meth:`synchronize`.

    Args:
        nbytes: Its memory.

    Attributes:
        log: What was enqueued and waited for, by name, in order.
        live: Its allocations by address.
        refuses: Whether nothing can be captured.
    """

    stream, name, sm = 7, "a pretended GPU", 120

    def __init__(self, nbytes: int = 1 << 32) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        self.live: dict[int, NDArray[np.uint8]] = {}
        self.refuses = False
        self._nbytes = nbytes
        self._queue: list[Callable[[], None]] = []
        self._captured: list[Callable[[], None]] | None = None

    def activate(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self._nbytes - sum(map(len, self.live.values()))

    def allocate(self, nbytes: int) -> Memory:
        if nbytes > self.free_bytes():
            raise PlanError("too much")
        raw = np.zeros(nbytes + 256, np.uint8)
        start = -raw.ctypes.data % 256
        array = raw[start : start + nbytes]
        self.live[array.ctypes.data] = array
        return Memory(array.ctypes.data, nbytes, self.live.pop)

    def host_array(self, nbytes: int) -> NDArray[np.uint8]:
        return np.full(nbytes, 0xAB, np.uint8)

    def write(self, region: Region, source: NDArray[Any]) -> None:
        assert source.flags.c_contiguous
        assert source.nbytes == region.width * region.height
        self._enqueue("write", lambda: self._copy(region, _bytes_of(source), to_device=True))

    def read(self, target: NDArray[Any], region: Region) -> None:
        assert target.flags.c_contiguous
        assert target.nbytes == region.width * region.height
        self._enqueue("read", lambda: self._copy(region, _bytes_of(target), to_device=False))

    def move(self, target: Region, source: Region) -> None:
        assert (target.width, target.height) == (source.width, source.height)
        flat = np.empty(source.width * source.height, np.uint8)

        def work() -> None:
            self._copy(source, flat, to_device=False)
            self._copy(target, flat, to_device=True)

        self._enqueue("move", work)

    def synchronize(self) -> None:
        self.log.append("wait")
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        if self.refuses:
            raise CaptureError("it refuses")
        self.log.append("capture")
        self._captured = []
        try:
            enqueue()
            captured = self._captured
        finally:
            self._captured = None

        def replay() -> None:
            self.log.append("replay")
            self._queue += captured

        return replay

    def enqueue(self, name: str, work: Callable[[], None]) -> None:
        """What an executor does."""
        self._enqueue(name, work)

    def at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of an allocation; a failure if they are not all inside one."""
        for start, array in self.live.items():
            if start <= address and address + nbytes <= start + len(array):
                return array[address - start : address - start + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address} are not allocated")

    def _enqueue(self, name: str, work: Callable[[], None]) -> None:
        if self._captured is not None:
            self._captured.append(work)
            return
        self.log.append(name)
        self._queue.append(work)

    def _copy(self, region: Region, flat: NDArray[np.uint8], *, to_device: bool) -> None:
        for i, part in enumerate(flat.reshape(region.height, region.width)):
            run = self.at(region.address + i * region.pitch, region.width)
            np.copyto(*((run, part) if to_device else (part, run)))


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """An array as the bytes it lies in."""
    return array.reshape(-1).view(np.uint8)


class HostExecutor:
    """A graph in ONNX Runtime; what it returns is written to where its outputs are bound."""

    def __init__(
        self,
        device: HostDevice,
        session: ort.InferenceSession,
        constants: Mapping[str, Binding],
        outputs: Sequence[str],
        *,
        capturable: bool,
    ) -> None:
        self._device, self._session, self._constants = device, session, constants
        self._outputs = list(outputs)
        self.capturable = capturable

    def run(self, bindings: Mapping[str, Binding], stream: int) -> None:
        assert stream == self._device.stream
        self._device.enqueue("run", lambda: self._run({**self._constants, **bindings}))

    def _run(self, bindings: Mapping[str, Binding]) -> None:
        feeds = {i.name: self._view(bindings[i.name]) for i in self._session.get_inputs()}
        for name, value in zip(self._outputs, self._session.run(self._outputs, feeds), strict=True):
            bound = bindings[name]
            assert value.shape == bound.shape, (name, value.shape, bound.shape)
            self._view(bound)[...] = value

    def _view(self, bound: Binding) -> NDArray[Any]:
        dtype = np.dtype(bound.dtype)
        nbytes = dtype.itemsize * int(np.prod(bound.shape))
        return self._device.at(bound.address, nbytes).view(dtype).reshape(bound.shape)


class HostEngine:
    """An engine whose graphs are lowered in float32 and run by ONNX Runtime, with all that a real one's manifest has.

    Args:
        bundle: The model bundle.
        directory: Where the engine is written.
        slots: Sequences.
        context: Positions.
        phases: Which graphs it has.
        doubled: Kinds of state that a run reads and writes in different buffers.
        capturable: Whether runs may be captured.

    Attributes:
        directory: The engine.
        doubled: As given.
        device: What it runs on.
        executors: What runs its graphs, by graph and phase, once they are open.
    """

    def __init__(
        self,
        bundle: Path,
        directory: Path,
        *,
        slots: int = 4,
        context: int = 512,
        phases: tuple[str, ...] = (DECODE, PREFILL),
        doubled: tuple[str, ...] = RECURRENT,
        capturable: bool = True,
    ) -> None:
        self.directory, self.device = directory, HostDevice()
        self.executors: dict[tuple[str, str], HostExecutor] = {}
        self.doubled, self._capturable = doubled, capturable
        options = BuildOptions(slots, context, activations="float32")
        build_engine(bundle, directory, options=options, use_cache=False)
        manifest = read_manifest(directory, ENGINE_BUNDLE)
        names = list(manifest["graphs"])
        models = {name: LoweredGraph(bundle, name, slots=slots, context=context) for name in names}
        self._sessions = {(n, phase): models[n].sessions[phase] for n in names for phase in phases}
        manifest["graphs"] = {
            f"{name}.{phase.name}": self._entry(name, phase, models[name])
            for name in names
            for phase in phases_of(slots, context)
            if phase.name in phases
        }
        manifest["backend"] = {"name": "host", "version": "1", "sms": [120]}
        manifest["weights"] = {"files": {}, "tensors": {}}
        write_manifest(directory, ENGINE_BUNDLE, manifest)

    def backend(self) -> OnGpu:
        """What opens it, for the table of backends."""
        return OnGpu(
            lambda: GpuBackend(
                "a pretended GPU",
                self._open,
                missing=list,
                doubled=self.doubled,
                obstacles=lambda sms: [],
                device=lambda sms: self.device,
            )
        )

    def _entry(self, name: str, phase: Any, model: LoweredGraph) -> dict[str, Any]:
        session = model.sessions[phase.name]
        path = self.directory / f"{name}.{phase.name}.engine"
        path.write_text(path.name)
        return {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "graph": name,
            "phase": phase.name,
            "inputs": [i.name for i in session.get_inputs()],
            # Without a second buffer there is no way back from an overflow, so such graphs have none.
            "outputs": [o.name for o in session.get_outputs() if self.doubled or o.name != OVERFLOW],
            "state": [s.to_json() for s in model.states],
            "steps": phase.steps,
            "logit_rows": phase.logit_rows,
            "pending": phase.pending,
            "cache_rows": phase.cache_rows,
        }

    def _open(
        self,
        directory: Path,
        entries: Mapping[str, Mapping[str, Any]],
        device: HostDevice,
        constants: Mapping[str, Binding],
    ) -> dict[str, HostExecutor]:
        assert directory == self.directory
        assert device is self.device
        found = {
            phase: HostExecutor(
                device,
                self._sessions[e["graph"], phase],
                constants,
                e["outputs"],
                capturable=self._capturable,
            )
            for phase, e in entries.items()
        }
        self.executors |= {(e["graph"], phase): found[phase] for phase, e in entries.items()}
        return found
