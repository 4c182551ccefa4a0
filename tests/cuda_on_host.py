# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: the package for the driver, on a driver that is fake_libcuda.c.

Arguments: the compiled library, a check of this module, and what that takes.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.gpu import device as module
from nemo_build.engines.gpu.device import CaptureError, CudaDevice, Device, Region
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.errors import PlanError


def memory(library: Any, device: Device) -> None:
    """Memory is of zeros, is copied in any shape, and is given back."""
    used = library.fake_used()
    block = device.allocate(4000)
    host = device.host_array(4000)
    assert block.address % 256 == 0
    host[:] = 1
    device.read(host, Region(block.address, 4000))
    device.synchronize()
    assert not host.any()
    rng = np.random.default_rng(0)
    want = np.zeros(4000, np.uint8)
    for _ in range(50):
        height, width = (int(n) for n in rng.integers(1, 20, 2))
        pitch = width + int(rng.integers(0, 9))
        start = int(rng.integers(0, 4000 - pitch * height))
        region = Region(block.address + start, width, height, pitch)
        part = rng.integers(0, 256, (height, width), np.uint8)
        device.write(region, part)
        device.synchronize()
        for i, row in enumerate(part):
            want[start + i * pitch : start + i * pitch + width] = row
        back = np.zeros_like(part)
        device.read(back, region)
        device.move(Region(block.address + 3900, 100), Region(block.address + 10, 100))
        device.synchronize()
        want[3900:4000] = want[10:110].copy()
        np.testing.assert_array_equal(back, part)
    device.read(host, Region(block.address, 4000))
    device.synchronize()
    np.testing.assert_array_equal(host, want)
    part = host[10:20].view(np.uint16)
    target, source = Region(block.address + 8, 5, 7, 24), Region(block.address + 2000, 5, 7, 9)
    device.move(target, source)
    device.read(host, Region(block.address, 4000))
    device.synchronize()
    for i in range(7):
        want[8 + 24 * i : 13 + 24 * i] = want[2000 + 9 * i : 2005 + 9 * i]
    np.testing.assert_array_equal(host, want)
    del block, host
    gc.collect()
    assert library.fake_used() == used
    assert library.fake_host_blocks() == 1, "a view of it lives on"
    del part
    gc.collect()
    assert library.fake_host_blocks() == 0


def too_much(library: Any, device: Device) -> None:
    """What does not fit is told with the arithmetic."""
    block = device.allocate(1 << 20)
    with pytest.raises(PlanError, match=r"Pretended 1 has 66\.1 MB free, and 0\.10 GB are needed") as caught:
        device.allocate(100 << 20)
    assert caught.value.problems == ("0.10 GB for one allocation",)
    assert block.nbytes == 1 << 20


def capturing(library: Any, device: Device) -> None:
    """What is captured does not run then, and does as often as it is asked to."""
    block = device.allocate(512)
    host = np.arange(1, 257, dtype=np.uint8)
    device.write(Region(block.address, 256), host)
    device.synchronize()
    replay = device.capture(lambda: device.move(Region(block.address + 256, 256), Region(block.address, 256)))
    out = np.zeros(256, np.uint8)

    def copied() -> NDArray[np.uint8]:
        device.read(out, Region(block.address + 256, 256))
        device.synchronize()
        return out

    assert not copied().any()
    replay()
    np.testing.assert_array_equal(copied(), host)
    device.write(Region(block.address, 256), host[::-1].copy())
    replay()
    np.testing.assert_array_equal(copied(), host[::-1])

    def refuse() -> None:
        raise RuntimeError("no such thing")

    with pytest.raises(CaptureError, match="no such thing"):
        device.capture(refuse)
    device.synchronize()  # it does not capture any more


def no_capture(library: Any, device: Device) -> None:
    """The driver's refusal has a name."""
    with pytest.raises(CaptureError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        device.capture(lambda: None)


def chosen(library: Any, device: Device) -> None:
    """The GPU is the one that the engine is for."""
    assert (device.name, device.sm) == ("Pretended 1", 120)
    assert module.obstacles((120, 90)) == []
    assert module.obstacles((90,)) == ["the engine is for SM 90; here is SM 80, SM 120"]


def no_gpu(library: Any, device: None) -> None:
    """A driver without a GPU."""
    assert module.obstacles((120,)) == ["there is no NVIDIA GPU here that the driver shows"]


class _Immediate(CudaDevice):
    """The device with what stands in for compiled graphs needs of it."""

    def enqueue(self, name: str, work: Callable[[], None]) -> None:
        work()

    def at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def session(library: Any, device: Device, bundle: str, folder: str) -> None:
    """A whole session on it."""
    from .fake_cuda import HostEngine

    engine = HostEngine(Path(bundle), Path(folder), slots=3, context=128, capturable=False)
    engine.device = _Immediate(*module._gpus()[1])  # type: ignore[assignment]
    manifest = read_manifest(engine.directory, ENGINE_BUNDLE)
    found = engine.backend().session(engine.directory, manifest, "target", slots=3, context=128)
    model = Path(bundle) / "target.onnx"
    reference = OrtSession(model, slots=3, context=128, pending=8, threads=1)
    for tokens, past, slots, accepted in (
        ([[1, 2, 3] * 9, [4]], [0, 0], [2, 0], [0, 0]),
        ([[5, 6, 7], [8]], [27, 1], [2, 0], [0, 0]),
        ([[9], [10, 11]], [29, 0], [2, 1], [2, 0]),
        ([[12], [13], [14]], [2, 30, 2], [0, 2, 1], [0, 0, 2]),
    ):
        batch = StepBatch.of_rows(tokens, past=past, slots=slots, accepted=accepted, logits="all")
        want = reference.step(batch).logits
        np.testing.assert_allclose(found.step(batch).logits, want, rtol=2e-4, atol=2e-4)
    kept = reference.state()
    for name, buffer in found.state().items():
        if name.startswith("ssm."):
            np.testing.assert_allclose(buffer[0].copy(), kept[name][0], rtol=1e-3, atol=1e-4)


def main(path: str, check: str, *arguments: str) -> None:
    """Have the driver's package find the library, and run a check."""
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    library.fake_used.restype = ctypes.c_size_t
    device = None if check == "no_gpu" else module.cuda_device((120,))
    globals()[check](library, device, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
