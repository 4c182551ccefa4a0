# SPDX-License-Identifier: Apache-2.0
"""A GPU as sessions need it: memory, copies, and one stream on which everything happens in order.

Nothing but :meth:`Device.synchronize` waits for the device. What is copied from and to must stay as it is until then.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.provenance import gpu_capabilities
from nemo_build.errors import PlanError

ALIGNMENT = 256
"""Bytes that the address of every tensor is a multiple of."""

PACKAGE = "cuda-bindings"
"""The distribution that has the driver's functions for Python."""


class Region(NamedTuple):
    """Bytes of the device: `height` runs of `width` bytes, one every `pitch` bytes from `address` on."""

    address: int
    width: int
    height: int = 1
    pitch: int = 0


class Memory:
    """Memory of a device; it is freed with the object.

    Args:
        address: Its first byte.
        nbytes: Its size.
        free: Frees it, given the address.
    """

    def __init__(self, address: int, nbytes: int, free: Callable[[int], None]) -> None:
        self.address, self.nbytes = address, nbytes
        self._finalizer = weakref.finalize(self, free, address)
        self._finalizer.atexit = False  # the driver goes with the process


class CaptureError(RuntimeError):
    """What was enqueued cannot be captured."""


class Device(Protocol):
    """A GPU, or what stands in for one.

    Attributes:
        stream: Handle of the stream that everything is enqueued on.
        name: What people call it.
        sm: Its compute capability times ten.
        lock: Held by whoever enqueues; a thread may take it again.
    """

    stream: int
    name: str
    sm: int
    lock: AbstractContextManager[Any]

    def activate(self) -> None:
        """Make the device the calling thread's; to be called in each thread before anything else."""
        ...

    def free_bytes(self) -> int:
        """Bytes that can be allocated."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Memory of zeros, aligned to :data:`ALIGNMENT`. Raises PlanError if there is not so much."""
        ...

    def host_array(self, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the host that copies run to and from without waiting."""
        ...

    def write(self, region: Region, source: NDArray[Any]) -> None:
        """Enqueue a copy from a contiguous array of as many bytes."""
        ...

    def read(self, target: NDArray[Any], region: Region) -> None:
        """Enqueue a copy to a contiguous array of as many bytes."""
        ...

    def move(self, target: Region, source: Region) -> None:
        """Enqueue a copy within the device, between regions of one width and height that do not overlap."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was enqueued. Raises RuntimeError if any of it failed."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Note what a function enqueues, which does not run; returns what enqueues all of it again.

        Raises:
            CaptureError: It does something that cannot be captured.
        """
        ...


def require_space(device: Device, parts: Sequence[tuple[str, int]]) -> None:
    """Raise PlanError, with the arithmetic, if a device has no room for all parts: what they are, and their bytes."""
    total, free = sum(nbytes for _, nbytes in parts), device.free_bytes()
    if total > free:
        gc.collect()  # sessions that nobody refers to any more
        free = device.free_bytes()
    if total > free:
        raise PlanError(
            f"{device.name} has {_size(free)} free, and {_size(total)} are needed:",
            [f"{_size(nbytes)} for {what}" for what, nbytes in parts],
            "Lower max_sequences or max_context, or end what else uses the GPU.",
        )


def obstacles(sms: Sequence[int]) -> list[str]:
    """Why no device here takes what was compiled for such GPUs (compute capability times ten); empty if one does."""
    found = []
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        found.append(f"the package {PACKAGE} is not installed: pip install {PACKAGE}")
    if not _has_driver():
        found.append("there is no CUDA driver here (libcuda)")
    try:
        here = gpu_capabilities() if found else [sm for _, sm in _gpus()]
    except RuntimeError as error:
        return [f"the CUDA driver does not start: {error}"]
    if not here:
        found.append(
            f"there is no NVIDIA GPU here that {'nvidia-smi tells of' if found else 'the driver shows'}"
        )
    elif not set(here) & set(sms):
        made, have = (", ".join(f"SM {sm}" for sm in sorted(set(side))) for side in (sms, here))
        found.append(f"the engine is for {made}; here is {have}")
    return found


@cache
def cuda_device(sms: tuple[int, ...]) -> Device:
    """The first GPU that the driver shows this process of those with such compute capabilities; there is one."""
    return CudaDevice(*next((handle, sm) for handle, sm in _gpus() if sm in sms))


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _gpus() -> list[tuple[Any, int]]:
    """The driver's handle of each GPU, and its compute capability times ten."""
    from cuda.bindings import driver as cu

    if cu.cuInit(0)[0] == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        return []
    _call(cu.cuInit, 0)
    found = []
    for ordinal in range(*_call(cu.cuDeviceGetCount)):
        (handle,) = _call(cu.cuDeviceGet, ordinal)
        parts = [
            _call(cu.cuDeviceGetAttribute, getattr(cu.CUdevice_attribute, name), handle)[0]
            for name in (f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}" for part in ("MAJOR", "MINOR"))
        ]
        found.append((handle, 10 * parts[0] + parts[1]))
    return found


class CudaDevice:
    """A GPU in its primary context, through the driver; see :class:`Device`.

    Args:
        handle: The driver's handle of the GPU.
        sm: Its compute capability times ten.
    """

    def __init__(self, handle: Any, sm: int) -> None:
        from cuda.bindings import driver

        self._cu, self.sm = driver, sm
        self.lock: AbstractContextManager[Any] = threading.RLock()
        (name,) = _call(driver.cuDeviceGetName, 256, handle)
        self.name = name.split(b"\0")[0].decode()
        (self._context,) = _call(driver.cuDevicePrimaryCtxRetain, handle)
        self.activate()
        (self._stream,) = _call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self.stream = int(self._stream)

    def activate(self) -> None:
        """See :class:`Device`."""
        _call(self._cu.cuCtxSetCurrent, self._context)

    def free_bytes(self) -> int:
        """See :class:`Device`."""
        free, _ = _call(self._cu.cuMemGetInfo)
        return int(free)

    def allocate(self, nbytes: int) -> Memory:
        """See :class:`Device`. The driver aligns to 256 bytes."""
        size = max(nbytes, ALIGNMENT)
        status, pointer = self._cu.cuMemAlloc(size)
        if status == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            require_space(self, [("one allocation", size)])
            raise PlanError(f"{self.name} has no {_size(size)} in one piece.")
        _check("cuMemAlloc", status)
        memory = Memory(int(pointer), size, self._free)
        _call(self._cu.cuMemsetD8Async, pointer, 0, size, self._stream)
        return memory

    def host_array(self, nbytes: int) -> NDArray[np.uint8]:
        """See :class:`Device`: page-locked memory. It is freed with the array and its views."""
        size = max(nbytes, 1)
        (pointer,) = _call(self._cu.cuMemHostAlloc, size, 0)
        buffer = (ctypes.c_ubyte * size).from_address(int(pointer))
        weakref.finalize(buffer, self._free_host, pointer).atexit = False
        return np.ctypeslib.as_array(buffer)

    def write(self, region: Region, source: NDArray[Any]) -> None:
        """See :class:`Device`."""
        if region.height == 1:
            _call(self._cu.cuMemcpyHtoDAsync, region.address, source.ctypes.data, region.width, self._stream)
            return
        copy = self._strided(region)
        copy.srcMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.srcHost, copy.srcPitch = source.ctypes.data, region.width
        copy.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.dstPitch = region.address, region.pitch
        _call(self._cu.cuMemcpy2DAsync, copy, self._stream)

    def read(self, target: NDArray[Any], region: Region) -> None:
        """See :class:`Device`."""
        if region.height == 1:
            _call(self._cu.cuMemcpyDtoHAsync, target.ctypes.data, region.address, region.width, self._stream)
            return
        copy = self._strided(region)
        copy.srcMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = region.address, region.pitch
        copy.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.dstHost, copy.dstPitch = target.ctypes.data, region.width
        _call(self._cu.cuMemcpy2DAsync, copy, self._stream)

    def move(self, target: Region, source: Region) -> None:
        """See :class:`Device`."""
        if target.height == 1:
            _call(self._cu.cuMemcpyDtoDAsync, target.address, source.address, target.width, self._stream)
            return
        copy = self._strided(target)
        copy.srcMemoryType = copy.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = source.address, source.pitch
        copy.dstDevice, copy.dstPitch = target.address, target.pitch
        _call(self._cu.cuMemcpy2DAsync, copy, self._stream)

    def synchronize(self) -> None:
        """See :class:`Device`."""
        _call(self._cu.cuStreamSynchronize, self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """See :class:`Device`. Other threads' calls of the driver are left out of account."""
        cu = self._cu
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _call(cu.cuStreamBeginCapture, self._stream, mode)
        refusal: RuntimeError | None = None
        try:
            enqueue()
        except RuntimeError as error:
            refusal = error
        finally:  # a stream that still captures could not be used for anything else
            status, graph = cu.cuStreamEndCapture(self._stream)
        if refusal is not None or status != cu.CUresult.CUDA_SUCCESS:
            raise CaptureError(str(refusal or f"cuStreamEndCapture: {status.name}")) from refusal
        (recording,) = _call(cu.cuGraphInstantiate, graph, 0)
        _call(cu.cuGraphDestroy, graph)
        return _Recording(cu, recording, self._stream)

    def _strided(self, region: Region) -> Any:
        copy = self._cu.CUDA_MEMCPY2D()
        copy.WidthInBytes, copy.Height = region.width, region.height
        return copy

    def _free(self, address: int) -> None:
        self.activate()  # whatever thread the garbage collector runs in
        _call(self._cu.cuMemFree, address)

    def _free_host(self, pointer: Any) -> None:
        self.activate()
        _call(self._cu.cuMemFreeHost, pointer)


class _Recording:
    """A captured graph; calling it enqueues it."""

    def __init__(self, cu: Any, recording: Any, stream: Any) -> None:
        self._launch = cu.cuGraphLaunch, recording, stream
        weakref.finalize(self, cu.cuGraphExecDestroy, recording).atexit = False

    def __call__(self) -> None:
        _call(*self._launch)


def _call(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of the driver; returns what it returns behind its status."""
    status, *results = function(*arguments)
    _check(function.__name__, status)
    return tuple(results)


def _check(name: str, status: Any) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{name}: {status.name}")


def _size(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
