# SPDX-License-Identifier: Apache-2.0
"""What this machine has, and what each backend can do on it. Everything claimed is tried."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import nemo_build
from nemo_build.engines import tensorrt, tensorrt_rtx
from nemo_build.engines.machine import processor, query_gpus
from nemo_build.engines.plan import host_memory
from nemo_build.engines.tensorrt.gpu import find_driver
from nemo_build.engines.trt import Library
from nemo_build.errors import UserError
from nemo_build.plugins import native as kernels
from nemo_build.plugins.codecs import native
from nemo_build.settings import cache_directory, threads

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "onnx",
    "onnx-ir",
    "onnxruntime-gpu",
    "onnxruntime",
    "tokenizers",
    "jinja2",
)
_OPTIONAL = ("torch", "transformers", "nvidia-modelopt", "tensorrt", "tensorrt-rtx")
_WARNING = 2  # onnxruntime's default log level
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
)


@dataclass(frozen=True)
class Backend:
    """A backend: its name, whether it works here, and how that was found or why it does not."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` finds.

    Memory in bytes; versions are ``None`` for packages that are not installed; ``packers`` is the instruction set of
    the native code that packs weights, or that it was not built (then NumPy does it); ``kernels`` likewise of the ops'
    CPU kernels.
    """

    versions: dict[str, str | None]
    cpu: str
    cpu_features: tuple[str, ...]
    threads: int
    memory: int
    gpus: tuple[str, ...]
    cache: str
    packers: str
    kernels: str
    backends: tuple[Backend, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at the machine and try the backends."""
    name, flags = processor()
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "nemo-build": nemo_build.__version__,
    }
    versions |= {p: _version(p) for p in (*_PACKAGES, *_OPTIONAL)}
    return Diagnosis(
        versions=versions,
        cpu=name,
        cpu_features=tuple(f for f in _FEATURES if f in flags),
        threads=threads(),
        memory=host_memory(),
        gpus=_gpus(),
        cache=str(cache_directory()),
        packers=native.describe(),
        kernels=_kernels(),
        backends=(
            _try_onnxruntime("CPUExecutionProvider", "onnxruntime (cpu)"),
            _try_onnxruntime("CUDAExecutionProvider", "onnxruntime (cuda)"),
            _tensorrt(),
            _compiler(tensorrt_rtx.LIBRARY, "builds engines on this machine"),
        ),
    )


def _kernels() -> str:
    """Which native kernels engines run here, or why they run the reference functions."""
    chosen, there = kernels.chosen(), kernels.instruction_sets()
    if not there:
        return "not built: engines run the reference functions, which are slow"
    if chosen is None:
        return "switched off by NEMO_BUILD_ISA: engines run the reference functions, which are slow"
    note = "" if "avx2" in there else "; this processor has no AVX2, so they are slow"
    return f"{chosen} (of {', '.join(there)}){note}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    """Name, memory and driver of each GPU; empty if there is none."""
    try:
        return tuple(query_gpus("name", "memory.total", "driver_version"))
    except OSError as error:
        return (f"nvidia-smi failed: {error}",)


def _try_onnxruntime(provider: str, name: str) -> Backend:
    """Run a small graph with a custom op on the provider.

    That a provider is listed says nothing: the GPU wheel lists CUDA on machines without a GPU.
    """
    import numpy as np
    import onnx.parser

    from nemo_build.plugins.registry import plugins_by_name

    try:
        import onnxruntime as ort
    except ImportError as error:
        return Backend(name, False, f"onnxruntime cannot be imported: {error}")
    if provider not in ort.get_available_providers():
        return Backend(name, False, "this build of onnxruntime does not have it")
    ort.set_default_logger_severity(4)  # a failed load of the provider's libraries is a finding, not noise
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23, "nemo" : 1]>'
        "probe (float[1, 1, 2] x, float[2, 2] w) => (float[1, 1, 2] y) { y = nemo.BlockLinear (x, w) }"
    )
    function = plugins_by_name()["BlockLinear"].function({}, ("x", "weight"), inputs=2)
    model.functions.append(function)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
        if session.get_providers()[0] != provider:
            return Backend(
                name, False, "onnxruntime fell back to the CPU: no GPU, or no CUDA 13 and cuDNN 9 libraries"
            )
        y = session.run(None, {"x": np.ones((1, 1, 2), np.float32), "w": np.eye(2, dtype=np.float32)})[0]
    except Exception as error:  # whatever goes wrong in the provider is the finding
        return Backend(name, False, str(error).splitlines()[0])
    finally:
        ort.set_default_logger_severity(_WARNING)
    if not np.array_equal(y, np.ones((1, 1, 2))):
        return Backend(name, False, "a test graph gave a wrong result")
    return Backend(name, True, f"onnxruntime {ort.__version__} ran a test graph")


def _compiler(library: Library, what: str) -> Backend:
    """Whether a compiler can be used: the right version is there, and its library loads."""
    name = f"{library.name} (build)"
    try:
        version = library.require()
    except UserError as error:
        return Backend(name, False, error.headline)
    # In a process of its own: a library that does not belong to this machine may end the process.
    command = [sys.executable, "-c", f"import {library.module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return Backend(name, False, f"it does not load: {last}")
    return Backend(name, True, f"{version} {what}")


def _tensorrt() -> Backend:
    """TensorRT also needs a GPU, and builds for those of its kind."""
    found = _compiler(tensorrt.LIBRARY, "")
    if not found.works:
        return found
    try:
        gpus = find_driver().gpus
    except UserError as error:
        return Backend(found.name, False, error.headline)
    if not gpus:
        return Backend(
            found.name, False, "it builds on the GPU that an engine is for, and there is none here"
        )
    sms = ", ".join(f"SM {sm}" for sm in sorted({gpu.sm for gpu in gpus}))
    return Backend(found.name, True, f"{found.detail}builds engines for {sms}")
