# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, as CUDA's driver tells; no package of Python's is needed."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from nemo_build.engines.targets import Target
from nemo_build.errors import UserError

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NAME_BYTES = 256
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Gpu:
    """A GPU: its number in CUDA's order, name, and compute capability times ten."""

    number: int
    name: str
    sm: int


@dataclass(frozen=True)
class Driver:
    """The driver: the newest CUDA that it is for, for example ``13.0``, and the GPUs that it shows."""

    cuda: str
    gpus: tuple[Gpu, ...]


def find_driver() -> Driver:
    """Ask the driver. What ``CUDA_VISIBLE_DEVICES`` hides is not there.

    Raises:
        UserError: There is no driver, or it does not work.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UserError(f"There is no CUDA driver here: {error}.") from error
    status = cuda.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(_cuda_version(cuda), ())
    if status:
        raise UserError(f"CUDA's driver does not start: error {status} of cuInit.")
    count = _number(cuda.cuDeviceGetCount)
    return Driver(_cuda_version(cuda), tuple(_gpu(cuda, i) for i in range(count)))


def require_gpu(target: Target) -> tuple[Gpu, Driver]:
    """The first GPU here of a target's compute capability.

    Raises:
        UserError: There is none; says what there is.
    """
    hint = (
        f"TensorRT times kernels on a GPU like the one that an engine is for: build on a machine with a GPU of "
        f"SM {target.sm}, such as {target.product}. --backend onnxruntime-cuda builds for it anywhere."
    )
    headline = f"An engine for {target.name} with TensorRT cannot be built here:"
    try:
        driver = find_driver()
    except UserError as error:
        raise UserError(headline, [error.headline], hint) from error
    for gpu in driver.gpus:
        if gpu.sm == target.sm:
            return gpu, driver
    found = [
        f"GPU {g.number} ({g.name}) is of SM {g.sm}, and {target.name} of SM {target.sm}" for g in driver.gpus
    ]
    raise UserError(headline, found or ["there is no NVIDIA GPU here"], hint)


def only(gpu: Gpu) -> dict[str, str]:
    """Variables that leave a process nothing but one of the GPUs that this one sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu.number].strip() if visible else str(gpu.number)}


def _gpu(cuda: ctypes.CDLL, number: int) -> Gpu:
    device, name = _number(cuda.cuDeviceGet, number), ctypes.create_string_buffer(_NAME_BYTES)
    _require(cuda.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    major, minor = (_number(cuda.cuDeviceGetAttribute, attribute, device) for attribute in (_MAJOR, _MINOR))
    return Gpu(number, name.value.decode(), 10 * major + minor)


def _cuda_version(cuda: ctypes.CDLL) -> str:
    version = _number(cuda.cuDriverGetVersion)  # 1000 * major + 10 * minor
    return f"{version // 1000}.{version % 1000 // 10}"


def _number(function: ctypes._NamedFuncPointer, *arguments: int) -> int:
    """The number that a function of the driver writes to its first argument."""
    found = ctypes.c_int()
    _require(function(ctypes.byref(found), *arguments), function.__name__)
    return found.value


def _require(status: int, name: str) -> None:
    if status:
        raise UserError(f"CUDA's driver does not answer: error {status} of {name}.")
