# SPDX-License-Identifier: Apache-2.0
"""Runs launches where there is no GPU: on Triton's interpreter, or on a driver that remembers what it is given."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes its types known to NumPy by name)
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.gpu import making
from nemo_build.engines.gpu.ops import ONNX_TYPES, selective_scan
from nemo_build.engines.gpu.weights import KernelWeights
from nemo_build.engines.ort_cuda import NAME, build, launches, library
from nemo_build.engines.ort_cuda.launches import Compiled, compile_nodes, with_launches
from nemo_build.plugins.gpu.compile import Binary, Hidden
from nemo_build.plugins.gpu.interpret import run
from nemo_build.plugins.gpu.kernel import Kernel, bind, resolve

DRIVER = Path(__file__).parent / "native" / "fake_driver.c"

_INTS = ctypes.POINTER(ctypes.c_int64)
_HOST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, _INTS, _INTS, _INTS, ctypes.POINTER(ctypes.c_void_p))


OPTIONS = BuildOptions(max_sequences=3, max_context=128, activations="float32", backend=NAME)
"""What :func:`make_engine` is asked for."""


@dataclass(frozen=True)
class Made:
    """An engine, what it was made of, and its kernels by label."""

    bundle: Path
    engine: Path
    compiled: Mapping[str, Compiled]


def no_code(kernel: Kernel, sm: int) -> Binary:
    """What stands in for compiling: facts of a kernel with bytes that are no machine code."""
    hidden = (Hidden("global_scratch", 0, 1), Hidden("profile_scratch", 0, 1))
    name = kernel.function.__name__
    code = hashlib.sha256(f"{kernel.label} for {sm}".encode()).digest()
    return Binary(sm, code, "", name, kernel.num_warps, 1024, 0, 0, hidden)


def make_engine(bundle: Path, out: Path) -> Made:
    """An engine for an H100, and its kernels, which have a few bytes in place of machine code.

    Activations are in float32 and rounded where the checkpoint says so, as in the portable graph.
    """
    compiled: dict[str, Compiled] = {}

    def compile_and_note(*arguments: Any) -> dict[str, Compiled]:
        found = compile_nodes(*arguments)
        compiled.update({c.kernel.label: c for c in found.values()})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            selective_scan, "SCAN_CHUNK", 16
        )  # so that prompts of a few tokens are of several chunks
        patch.setattr(launches, "compile_kernel", no_code)
        patch.setattr(making, "KernelWeights", lambda *a, rounds, **k: KernelWeights(*a, rounds=True, **k))
        patch.setattr(build, "compile_nodes", compile_and_note)
        build_engine(bundle, out, "h100", OPTIONS, use_cache=False)
    return Made(bundle, out, compiled)


@contextmanager
def interpreting(kernels: Mapping[str, Kernel]) -> Iterator[list[str]]:
    """Run launches of sessions on the CPU in Triton's interpreter meanwhile; gives the labels of those that ran.

    Args:
        kernels: By label.
    """
    ran: list[str] = []
    failures: list[BaseException] = []

    @_HOST
    def host(label: bytes, sizes: Any, grid: Any, dims: Any, pointers: Any) -> int:
        try:
            kernel = kernels[label.decode()]
            ran.append(kernel.label)
            arrays = _arrays(kernel, dims, pointers)
            bound = bind(kernel.inputs, {t.name: arrays[t.name].shape for t in kernel.inputs})
            assert [sizes[i] for i in range(len(kernel.sizes))] == [bound[n] for n in kernel.sizes]
            assert tuple(grid[i] for i in range(3)) == kernel.grid(bound)
            made = run(kernel, {t.name: arrays[t.name] for t in kernel.inputs})
            for tensor in kernel.outputs:
                arrays[tensor.name][...] = made[tensor.name]
        except BaseException as error:
            failures.append(error)
            return 0
        return 1

    native = _native()
    native.nemo_gpu_set_host(host)
    try:
        yield ran
    except Exception as error:
        raise failures[0] if failures else error from None
    finally:
        native.nemo_gpu_set_host(None)


def _arrays(kernel: Kernel, dims: Any, pointers: Any) -> dict[str, np.ndarray]:
    """A launch's tensors as views of their memory."""
    found, at = {}, 0
    for tensor, pointer in zip((*kernel.inputs, *kernel.outputs), pointers, strict=False):
        shape = tuple(dims[at + i] for i in range(len(tensor.shape)))
        at += len(shape)
        dtype = np.dtype(tensor.dtype)
        memory = (ctypes.c_ubyte * (int(np.prod(shape)) * dtype.itemsize)).from_address(pointer or 1)
        found[tensor.name] = np.frombuffer(memory, dtype).reshape(shape)
    return found


class Record(ctypes.Structure):
    """What ``native/fake_driver.c`` remembers."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("launches", "modules", "result", "shared_attribute")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64 * 64),
        ("entry", ctypes.c_char * 128),
        ("code", ctypes.c_uint8 * 16),
    )


class FakeDriver:
    """The driver that launches nothing.

    Attributes:
        record: What it was given.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "libfake_driver.so"
        subprocess.run(["gcc", "-shared", "-fPIC", DRIVER, "-o", self._path], check=True, capture_output=True)
        self._library = ctypes.CDLL(str(self._path))
        self._library.fake_record.restype = ctypes.POINTER(Record)
        self.record: Record = self._library.fake_record().contents

    @contextmanager
    def launching(self) -> Iterator[FakeDriver]:
        """Launch on it meanwhile, in sessions on the CPU."""
        native = _native()
        self._library.fake_reset()
        native.nemo_gpu_set_driver(str(self._path).encode())
        try:
            yield self
        finally:
            native.nemo_gpu_set_driver(None)

    def expect(self, sizes: Sequence[int]) -> None:
        """The bytes of each parameter of the launches that come."""
        self._library.fake_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))


def _native() -> ctypes.CDLL:
    return ctypes.CDLL(str(library()))


class OneLaunch:
    """A graph of one kernel node, in ONNX Runtime on the CPU.

    Args:
        folder: Where it may write.
        compiled: The kernel.
        changes: Attributes that are to be other than they should; None takes one away.
        code: Whether the machine code is a constant, not an input.
    """

    def __init__(self, folder: Path, compiled: Compiled, *, code: bool = True, **changes: Any) -> None:
        kernel = compiled.kernel
        self.kernel = kernel
        inputs, outputs = (
            [_value(t.name, t.dtype, t.shape) for t in ts] for ts in (kernel.inputs, kernel.outputs)
        )
        for value in outputs:
            value.name += ".out"
        names = [[v.name for v in values] for values in (inputs, outputs)]
        node = onnx.helper.make_node("Kernel", *names, name="node", domain="nemo.gpu")
        graph = onnx.helper.make_graph([node], "g", inputs, outputs)
        opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("nemo.gpu", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)
        model = with_launches(model, {"Kernel": compiled})
        (folder / compiled.file).parent.mkdir(exist_ok=True)
        (folder / compiled.file).write_bytes(compiled.binary.cubin)
        attributes = {**compiled.attributes(), **changes}
        del model.graph.node[0].attribute[:]
        model.graph.node[0].attribute.extend(
            onnx.helper.make_attribute(n, v) for n, v in attributes.items() if v is not None
        )
        if not code:
            del model.graph.initializer[:]
            model.graph.input.append(_value(compiled.file, "uint8", ("bytes",)))
        path = folder / "one.onnx"
        path.write_bytes(model.SerializeToString())
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(library()))
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, arrays: Mapping[str, np.ndarray], *, in_place: bool = True) -> dict[str, np.ndarray]:
        """Run it on the kernel's inputs by name; returns its outputs. Those that share a buffer are bound so."""
        binding = self.session.io_binding()
        given = {name: np.array(array, order="C") for name, array in arrays.items()}
        sizes = bind(self.kernel.inputs, {n: a.shape for n, a in given.items()})
        found = {}
        self.addresses = []
        for tensor in self.kernel.inputs:
            array = given[tensor.name]
            binding.bind_input(
                tensor.name, "cpu", 0, _onnx_type(tensor.dtype), array.shape, array.ctypes.data
            )
            self.addresses.append(array.ctypes.data)
        for tensor in self.kernel.outputs:
            shape = tuple(resolve(d, sizes) for d in tensor.shape)
            shared = tensor.alias is not None and in_place
            array = given[tensor.alias] if shared else np.zeros(shape, np.dtype(tensor.dtype))
            found[tensor.name] = array
            name = f"{tensor.name}.out"
            binding.bind_output(name, "cpu", 0, _onnx_type(tensor.dtype), array.shape, array.ctypes.data)
            self.addresses.append(array.ctypes.data)
        self.session.run_with_iobinding(binding)
        return found


def _onnx_type(dtype: str) -> int:
    return int({**ONNX_TYPES, "uint8": onnx.TensorProto.UINT8}[dtype])


def _value(name: str, dtype: str, shape: Sequence[Any]) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(
        name, _onnx_type(dtype), [d if isinstance(d, int) else None for d in shape]
    )
