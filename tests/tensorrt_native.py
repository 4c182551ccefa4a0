# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the module ``tensorrt`` in the process that builds a plan; tests put a package around it.

Parsing, types, shapes and the compilation of everything but plugins are TensorRT-RTX's, whose Python interface is the
same. A plugin is driven as TensorRT does, through the vendor's own package; in the network, layers take its place that
have the types it says, and compute the shapes it says from expressions. They read all that the plugin reads.

What is asked of the module goes to a file in the folder ``TENSORRT_STUB_JOURNAL`` for each plan.
``TENSORRT_STUB_FAIL`` names what is to go wrong: ``start``, ``plugin``, ``open``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorrt_rtx
from tensorrt_stub import Build, native_module

FAIL = os.environ.get("TENSORRT_STUB_FAIL", "")
TIMINGS = b"timings"
"""What a timing cache begins with; anything else is refused."""


class Size:
    """A size that is known when a plan runs, as a vector of one; operations on it are layers."""

    def __init__(self, network: Any, tensor: Any) -> None:
        self.network, self.tensor = network, tensor

    def _with(self, operation: str, other: Any, swapped: bool = False) -> Size:
        pair = [self.tensor, vector(self.network, other)]
        kind = getattr(tensorrt_rtx.ElementWiseOperation, operation)
        layer = self.network.add_elementwise(*(reversed(pair) if swapped else pair), kind)
        return Size(self.network, layer.get_output(0))

    def __add__(self, other: Any) -> Size:
        return self._with("SUM", other)

    def __sub__(self, other: Any) -> Size:
        return self._with("SUB", other)

    def __rsub__(self, other: Any) -> Size:
        return self._with("SUB", other, swapped=True)

    def __mul__(self, other: Any) -> Size:
        return self._with("PROD", other)

    def __floordiv__(self, other: Any) -> Size:
        return self._with("FLOOR_DIV", other)

    def __neg__(self) -> Size:
        return self * -1

    __radd__, __rmul__ = __add__, __mul__


def vector(network: Any, size: Any) -> Any:
    """A size or a number as a vector of one."""
    if isinstance(size, Size):
        return size.tensor
    return network.add_constant((1,), np.array([size], np.int64)).get_output(0)


class PluginLayer:
    """Layers in place of a plugin: its outputs are the sum of the first number of each input, repeated."""

    def __init__(self, network: Any, inputs: list[Any], plugin: Any) -> None:
        self.name, self.inputs = "", inputs
        shapes = [[d if d >= 0 else f"{i}:{a}" for a, d in enumerate(t.shape)] for i, t in enumerate(inputs)]
        self.made = Build.of(plugin, [(t.dtype, shape) for t, shape in zip(inputs, shapes, strict=True)])
        sizes = {}
        for tensor, shape in zip(inputs, shapes, strict=True):
            length = network.add_shape(tensor).get_output(0)
            for axis, dim in enumerate(shape):
                if isinstance(dim, str):
                    part = network.add_slice(length, (axis,), (1,), (1,)).get_output(0)
                    sizes[dim] = Size(network, part)
        number = self._sum(network, inputs)
        self.outputs = []
        for dtype, dims in zip(self.made.types, self.made.shapes, strict=True):
            rank = len(dims)
            shape = network.add_concatenation([vector(network, d.evaluate(sizes)) for d in dims])
            one = network.add_shuffle(number)
            one.reshape_dims = (1,) * rank
            many = network.add_slice(one.get_output(0), (0,) * rank, (1,) * rank, (0,) * rank)
            many.set_input(2, shape.get_output(0))
            known = network.add_shuffle(many.get_output(0))
            known.reshape_dims = tuple(d.get_constant_value() if d.is_constant() else 0 for d in dims)
            self.outputs.append(network.add_cast(known.get_output(0), dtype).get_output(0))

    @staticmethod
    def _sum(network: Any, inputs: list[Any]) -> Any:
        total = None
        for tensor in inputs:
            flat = network.add_shuffle(network.add_cast(tensor, tensorrt_rtx.float32).get_output(0))
            flat.reshape_dims = (-1,)
            first = network.add_slice(flat.get_output(0), (0,), (1,), (1,)).get_output(0)
            kind = tensorrt_rtx.ElementWiseOperation.SUM
            total = first if total is None else network.add_elementwise(total, first, kind).get_output(0)
        return total

    def get_output(self, index: int) -> Any:
        return self.outputs[index]

    def to_json(self) -> dict[str, Any]:
        plugin = self.made.plugin
        return {
            "name": self.name,
            "plugin": plugin.plugin_name,
            "namespace": plugin.plugin_namespace,
            "inputs": [[t.name, t.dtype.name, list(t.shape)] for t in self.inputs],
            "outputs": [[t.name, t.dtype.name, len(t.shape)] for t in self.outputs],
            "aliases": [plugin.get_aliased_input(i) for i in range(len(self.outputs))],
            "tactics": self.made.tactics,
        }


class Config:
    """A builder's configuration: RTX's, and a timing cache."""

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "real", real)
        real.num_compute_capabilities = 1
        real.set_compute_capability(tensorrt_rtx.ComputeCapability.SM120, 0)
        object.__setattr__(self, "timings", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def create_timing_cache(self, data: bytes) -> TimingCache | None:
        return TimingCache(data or TIMINGS) if not data or data.startswith(TIMINGS) else None

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        object.__setattr__(self, "timings", cache)
        return not cache.data.endswith(b"of another GPU")

    def get_timing_cache(self) -> TimingCache:
        return self.timings


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def combine(self, other: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.data += other.data.removeprefix(TIMINGS)
        return True

    def serialize(self) -> memoryview:
        return memoryview(self.data)


class Builder:
    """RTX's builder. Networks can have plugins."""

    def __init__(self, logger: Any) -> None:
        if FAIL == "start":
            logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger, self._real = logger, tensorrt_rtx.Builder(logger)
        self._plugins: list[PluginLayer] = []
        self._flags = 0

    def create_network(self, flags: int) -> Any:
        self._flags = flags
        network = self._real.create_network(0)

        def add_plugin(network: Any, create: Any, aot: bool) -> PluginLayer | None:
            assert aot
            if FAIL == "plugin":
                self._logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "no such format")
                return None
            request = _FOR_PLUGINS.QuickPluginCreationRequest.STRICT_AOT
            inputs, shape_inputs, plugin = create(request)
            assert not shape_inputs
            self._plugins.append(PluginLayer(network, inputs, plugin))
            return self._plugins[-1]

        tensorrt_rtx.INetworkDefinition.add_plugin = add_plugin
        return network

    def create_builder_config(self) -> Config:
        return Config(self._real.create_builder_config())

    def create_optimization_profile(self) -> Any:
        return self._real.create_optimization_profile()

    def build_serialized_network_to_stream(self, network: Any, config: Config, writer: Any) -> bool:
        folder = Path(os.environ["TENSORRT_STUB_JOURNAL"])
        journal = {
            "flags": self._flags,
            "plugins": [layer.to_json() for layer in self._plugins],
            "inputs": [network.get_input(i).name for i in range(network.num_inputs)],
            "outputs": [network.get_output(i).name for i in range(network.num_outputs)],
            "tf32": config.get_flag(tensorrt_rtx.BuilderFlag.TF32),
            "aliased": config.get_preview_feature(tensorrt_rtx.PreviewFeature.ALIASED_PLUGIN_IO_10_03),
            "level": config.builder_optimization_level,
            "verbosity": config.profiling_verbosity.name,
            "profiles": config.num_optimization_profiles,
            "monitored": config.progress_monitor is not None,
            "timings": config.timings.data.decode(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(journal))
        config.timings.data += b" one"
        return self._real.build_serialized_network_to_stream(network, config.real, writer)


class Runtime:
    """Opens anything that looks like a plan."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, data: bytes) -> SimpleNamespace | None:
        assert data.startswith(b"vtrt")
        if FAIL == "open":
            self._logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "out of memory")
            return None
        return SimpleNamespace(device_memory_size_v2=12345, num_layers=67)


_FOR_PLUGINS = native_module()
_KEPT = ("DataType", "ITensor", "Logger", "TensorFormat", "float32", "int32")
globals().update({n: getattr(tensorrt_rtx, n) for n in dir(tensorrt_rtx) if n not in globals()})
globals().update({n: v for n, v in vars(_FOR_PLUGINS).items() if not n.startswith("__") and n not in _KEPT})
NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=3)
