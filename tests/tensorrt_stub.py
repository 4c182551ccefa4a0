# SPDX-License-Identifier: Apache-2.0
"""A stand-in for TensorRT's native module, with which its package for plugins runs without a GPU or a driver.

It has the types that the package ``tensorrt.plugin`` names, and a :class:`Build` that calls a plugin in the order in
which TensorRT does while it builds an engine. Dimensions are trees that are evaluated afterwards, so what a plugin says
about shapes is shown to hold for any.
"""

from __future__ import annotations

import enum
import importlib.util
import operator
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 UINT8 FP8 INT4 FP4 BOOL")
Operation = enum.Enum("Operation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV")
_DO = {
    "SUM": operator.add,
    "PROD": operator.mul,
    "SUB": operator.sub,
    "FLOOR_DIV": operator.floordiv,
    "CEIL_DIV": lambda a, b: -(-a // b),
}


class Dimension:
    """A number, the name of a size, or an operation on two dimensions."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def is_constant(self) -> bool:
        first, *rest = self._parts
        return isinstance(first, int) or (bool(rest) and all(d.is_constant() for d in rest))

    def get_constant_value(self) -> int:
        return self.evaluate({})

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        first, *rest = self._parts
        if rest:
            return _DO[first.name](*(d.evaluate(sizes) for d in rest))
        return first if isinstance(first, int) else sizes[first]


class Builder:
    """What TensorRT gives a plugin to make dimensions with."""

    constant = staticmethod(Dimension)
    operation = staticmethod(Dimension)


class Dims(list):
    MAX_DIMS = 8

    def __init__(self, content: Any = 0) -> None:
        super().__init__([None] * content if isinstance(content, int) else content)


class TensorDesc:
    """Type, format and shape of a tensor."""

    def __init__(self, dims: Sequence[int] = (), dtype: DataType | None = None) -> None:
        self.dims, self.type, self.format, self.scale = tuple(dims), dtype, None, 1.0


class DynamicTensorDesc:
    """A tensor with the range of its shapes."""

    def __init__(self, desc: TensorDesc) -> None:
        self.desc, self.min, self.opt, self.max = desc, desc.dims, desc.dims, desc.dims


class Field:
    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name, self.data, self.type = name, data, kind


class Registry:
    """The plugin registry."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> None:
        self.creators[creator.name, namespace] = creator

    def get_creator(self, name: str, _version: str, namespace: str) -> Any:
        return self.creators[name, namespace]


def native_module() -> ModuleType:
    """The module ``tensorrt``, so far as the package reads it."""
    module, registry = ModuleType("tensorrt"), Registry()
    module.__path__ = []  # type: ignore[attr-defined]
    empty = "IPluginV3 IPluginV3QuickCore IPluginV3QuickBuild IPluginV3QuickRuntime IPluginV3QuickAOTBuild"
    for name in (*empty.split(), "IPluginCreatorV3Quick", "ISymExpr", "ITensor"):
        setattr(module, name, type(name, (), {}))
    enums = {
        "PluginFieldType": "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN",
        "PluginArgType": "INT",
        "PluginArgDataType": "INT8 INT16 INT32",
        "QuickPluginCreationRequest": "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT",
        "TensorFormat": "LINEAR HWC",
        "TensorRTPhase": "BUILD RUNTIME",
    }
    for name, members in enums.items():
        setattr(module, name, enum.Enum(name, members))
    silent = type("Logger", (), {"WARNING": 0, "log": lambda self, *_: None})
    others = {
        "DataType": DataType,
        "DimensionOperation": Operation,
        "IDimensionExpr": Dimension,
        "IExprBuilder": Builder,
        "Dims": Dims,
        "DimsExprs": Dims,
        "PluginTensorDesc": TensorDesc,
        "DynamicPluginTensorDesc": DynamicTensorDesc,
        "PluginField": Field,
        "PluginFieldCollection": list,
        "Logger": silent,
        "get_plugin_registry": lambda: registry,
        "int32": DataType.INT32,
    }
    for name, value in others.items():
        setattr(module, name, value)
    return module


def vendor_package() -> Path | None:
    """The vendor's package for plugins, if it is installed. Its native module is not loaded."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "plugin"


@contextmanager
def vendor_plugins(location: Path) -> Iterator[ModuleType]:
    """Import the vendor's package as ``tensorrt.plugin``, on top of the stand-in; undone afterwards."""
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "tensorrt"}
    for name in before:
        del sys.modules[name]
    sys.modules["tensorrt"] = native = native_module()
    try:
        spec = importlib.util.spec_from_file_location(
            "tensorrt.plugin", location / "__init__.py", submodule_search_locations=[str(location)]
        )
        native.plugin = module = importlib.util.module_from_spec(spec)
        sys.modules["tensorrt.plugin"] = module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its docstrings have escapes that Python does not know
            spec.loader.exec_module(module)
        yield native
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt"]:
            del sys.modules[name]
        sys.modules.update(before)


class Build:
    """One node while an engine is built.

    Attributes:
        plugin: The vendor's object.
        types: Types of the outputs.
        shapes: Shapes of the outputs, of :class:`Dimension`.
        formats: Type and layout of every input and output, for each combination.
        tactics: The tactics it offers.
    """

    def __init__(
        self, trt: Any, name: str, inputs: Sequence[tuple[DataType, Sequence[int | str]]], **attributes: Any
    ) -> None:
        """``inputs`` are types and shapes; a dimension that has a name is only known later."""
        create = getattr(trt.plugin.op.nemo, name)(*(trt.ITensor() for _ in inputs), **attributes)
        _, _, plugin = create(trt.QuickPluginCreationRequest.STRICT_AOT)
        self._describe(plugin, inputs)

    @classmethod
    def of(cls, plugin: Any, inputs: Sequence[tuple[Any, Sequence[int | str]]]) -> Build:
        """A node whose plugin is there already."""
        made = cls.__new__(cls)
        made._describe(plugin, inputs)
        return made

    def _describe(self, plugin: Any, inputs: Sequence[tuple[Any, Sequence[int | str]]]) -> None:
        self.plugin = plugin
        self.types = self.plugin.get_output_data_types([t for t, _ in inputs], [len(s) for _, s in inputs])
        self._dims = [Dims([Dimension(d) for d in shape]) for _, shape in inputs]
        self.shapes = self.plugin.get_output_shapes(self._dims, [], Builder())
        numbers = [[d if isinstance(d, int) else -1 for d in shape] for _, shape in inputs]
        numbers += [[d.get_constant_value() if d.is_constant() else -1 for d in s] for s in self.shapes]
        types = [*(t for t, _ in inputs), *self.types]
        self._all = [DynamicTensorDesc(TensorDesc(d, t)) for d, t in zip(numbers, types, strict=True)]
        self._count = len(inputs)
        made = self.plugin.get_supported_format_combinations(self._all, self._count)
        each = len(self._all)
        self.formats = [[(d.type, d.format) for d in made[i : i + each]] for i in range(0, len(made), each)]
        for tensor, (dtype, layout) in zip(self._all, self.formats[0], strict=True):
            tensor.desc.type, tensor.desc.format = dtype, layout
        self.plugin.configure_plugin(self._all[: self._count], self._all[self._count :])
        self.tactics = sorted(self.plugin.get_valid_tactics())

    def launch(self, tactic: int) -> SimpleNamespace:
        """Launch parameters, further arguments (``extra``), and ``entry`` and ``code`` of the kernel."""
        params, extra = SimpleNamespace(), _Setter()
        self.plugin.set_tactic(tactic)
        self.plugin.get_launch_params(self._dims, self._all, self._count, params, extra, Builder())
        described = [t.desc for t in self._all]
        entry, code = self.plugin.get_kernel(described[: self._count], described[self._count :])
        return SimpleNamespace(**vars(params), extra=extra.made, entry=entry, code=code)


class _Setter:
    """Takes a kernel's further arguments."""

    nbSymExprs = 0

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __setitem__(self, index: int, value: Any) -> None:
        assert index == len(self.made) < self.nbSymExprs
        self.made.append(value)
