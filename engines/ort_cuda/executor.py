# SPDX-License-Identifier: Apache-2.0
"""Runs graphs with launches in ONNX Runtime, on tensors that the session owns.

Nothing is copied: all inputs and outputs are bound by their addresses, states to one for both, and work goes to the
session's stream. ONNX Runtime allocates intermediate results itself, in an arena for each phase.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from nemo_build.engines.gpu.device import Device
from nemo_build.engines.gpu.executor import Binding, Executor
from nemo_build.engines.ort_cuda import PROVIDER, library
from nemo_build.errors import BundleError

CUDA_LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")
"""What the provider of ONNX Runtime 1.31 is linked to, besides the driver."""

_TYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "bfloat16": int(onnx.TensorProto.BFLOAT16),
    "int32": np.int32,
    "int64": np.int64,
}
_KEPT = 32  # sets of bindings; a session has one for each shape that it runs


class OrtExecutor:
    """One phase of one graph; see :class:`~nemo_build.engines.gpu.executor.Executor`.

    Args:
        session: ONNX Runtime's session.
        device: Type and number of the device that addresses are of, by ONNX Runtime's names.
        constants: Inputs that stay what they are; there may be more than the graph has.
    """

    capturable = False  # shapes are computed and copied by the host

    def __init__(
        self, session: ort.InferenceSession, device: tuple[str, int], constants: Mapping[str, Binding]
    ) -> None:
        self._session, self._device = session, device
        self._inputs = {i.name for i in session.get_inputs()}
        self._outputs = {o.name for o in session.get_outputs()}
        self._constants = {name: b for name, b in constants.items() if name in self._inputs}
        self._bound: dict[int, tuple[Mapping[str, Binding], Any]] = {}
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(self, bindings: Mapping[str, Binding], stream: int) -> None:
        """See :class:`~nemo_build.engines.gpu.executor.Executor`; `stream` is the one that the graph was opened on."""
        if id(bindings) not in self._bound:
            if len(self._bound) == _KEPT:
                del self._bound[next(iter(self._bound))]
            self._bound[id(bindings)] = bindings, self._bind(bindings)
        _, binding = self._bound[id(bindings)]
        try:
            self._session.run_with_iobinding(binding, self._options)
        except Exception as error:  # ONNX Runtime's own exception types share no base class
            raise RuntimeError(f"ONNX Runtime: {error}") from error

    def _bind(self, bindings: Mapping[str, Binding]) -> Any:
        bound = self._session.io_binding()
        for name, tensor in (*self._constants.items(), *bindings.items()):
            described = *self._device, _TYPES[tensor.dtype], list(tensor.shape), tensor.address
            if name in self._inputs:
                bound.bind_input(name, *described)
            if name in self._outputs:
                bound.bind_output(name, *described)
        return bound


def open_graphs(
    directory: Path,
    entries: Mapping[str, Mapping[str, Any]],
    device: Device,
    constants: Mapping[str, Binding],
) -> dict[str, Executor]:
    """Open all phases of a graph on a GPU; see :class:`~nemo_build.engines.gpu.executor.Opener`.

    Raises:
        BundleError: ONNX Runtime's CUDA provider does not start, or a file is damaged or missing.
    """
    ordinal = _ordinal(device)
    options = {
        "device_id": str(ordinal),
        "user_compute_stream": str(device.stream),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",  # what is left in float32, such as routers, is meant to be
    }
    providers = [(PROVIDER, options), "CPUExecutionProvider"]
    _require_provider(providers)
    return {
        phase: OrtExecutor(_open(directory / str(entry["file"]), providers), ("cuda", ordinal), constants)
        for phase, entry in entries.items()
    }


def open_on_host(
    directory: Path,
    entries: Mapping[str, Mapping[str, Any]],
    device: Device,
    constants: Mapping[str, Binding],
) -> dict[str, Executor]:
    """The same on the CPU, for `device` whose addresses are the host's; kernels are run by whom :func:`set_host` names.

    Only graphs with activations in float32: the CPU provider has no kernels for bfloat16.
    """
    return {
        phase: OrtExecutor(
            _open(directory / str(entry["file"]), ["CPUExecutionProvider"]), ("cpu", 0), constants
        )
        for phase, entry in entries.items()
    }


def missing() -> list[str]:
    """What this backend lacks here, besides a GPU and its driver."""
    found = []
    if library() is None:
        found.append(
            "the library that launches kernels was not compiled when nemo-build was installed: "
            "it takes a C++ compiler"
        )
    if PROVIDER not in ort.get_available_providers():
        return [*found, "this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu"]
    with redirect_stdout(io.StringIO()):  # it prints what it does not find
        ort.preload_dlls(cudnn=False)
    lacking = [name for name in CUDA_LIBRARIES if not _loads(name)]
    if lacking:
        found.append(
            f"{', '.join(lacking)} cannot be loaded: pip install 'onnxruntime-gpu[cuda]', or install CUDA 13"
        )
    return found


def _require_provider(providers: list[Any]) -> None:
    """Start the CUDA provider with an empty graph: with it missing, ONNX Runtime would go on without a word."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "empty", [value], [value])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
        said = "" if PROVIDER in session.get_providers() else "it is left out"
    except Exception as error:  # ONNX Runtime's own exception types share no base class
        said = str(error)
    if said:
        raise BundleError(
            "ONNX Runtime cannot start its CUDA provider:",
            missing() or [said],
            "`nemo-build doctor` runs a graph on each provider; an engine built with --target cpu needs no GPU.",
        )


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _open(path: Path, providers: list[Any]) -> ort.InferenceSession:
    """A session with the launch op. Raises BundleError if a file is damaged or missing."""
    launches = library()
    if launches is None:
        raise BundleError(
            "The library that launches kernels is not there.", missing(), "Install nemo-build again."
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(launches))
    try:
        return ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime's own exception types share no base class
        raise BundleError(
            f"ONNX Runtime cannot load {path}: {error}", hint="Build the engine again."
        ) from error


def _ordinal(device: Device) -> int:
    """The number of a GPU among those of this process."""
    from cuda.bindings import driver

    device.activate()
    status, handle = driver.cuCtxGetDevice()
    if int(status) != 0:
        raise RuntimeError(f"cuCtxGetDevice: {status.name}")
    return int(handle)
