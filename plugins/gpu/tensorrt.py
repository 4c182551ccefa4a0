# SPDX-License-Identifier: Apache-2.0
"""TensorRT plugins made of kernel descriptions: quick-deployable ones, compiled ahead of time.

A plugin is a :class:`~nemo_build.plugins.gpu.node.Node`, one launch. Its shapes, types, variants (*tactics*, of which
TensorRT times each) and launch parameters all follow from :class:`~nemo_build.plugins.gpu.kernel.Kernel`, so a kernel
that an op gains is a plugin without anything being added here. An engine holds the kernels' code and needs neither
Python nor Triton when it runs.

Code is handed over as PTX, which is what TensorRT documents; in it, Triton's hidden parameters are struck out
(:func:`plain_ptx`). All its operations on floats name their rounding, so whoever assembles it cannot fuse them and
results are those of Triton's own machine code; registers may be allocated otherwise than ``docs/kernels.md`` says. The
vendor's package is imported when :func:`register` is called, not before.

More than 48 KiB of shared memory have to be asked for, and nothing says whether TensorRT does; kernels that need more
are not among the tactics. Outputs that share an input's buffer need the builder's preview feature for aliased inputs
and outputs of plugins.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import GenericAlias
from typing import Any

from nemo_build.errors import UserError
from nemo_build.plugins.gpu.compile import SHARED_UNASKED, Binary, compile_kernel
from nemo_build.plugins.gpu.kernel import Kernel, resolve
from nemo_build.plugins.gpu.node import Node
from nemo_build.plugins.schema import DOMAIN

TYPES = {
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "int32": "INT32",
    "int64": "INT64",
}
"""Element types of kernels, and what TensorRT's descriptions of formats call them."""

ATTRIBUTE = "sm"
"""The only attribute of every plugin: the architecture to compile for."""

_TAKEN = {ATTRIBUTE, "outputs", "stream", "tactic"}  # parameter names with a meaning of their own
_WARP = 32


def register(made: Iterable[Node]) -> None:
    """Make nodes known to TensorRT in this process; those that are known already stay as they are.

    Afterwards ``tensorrt.plugin.op.nemo.NAME(*tensors, sm=90)`` gives what ``add_plugin`` takes.

    Raises:
        UserError: TensorRT is not installed, or does not have plugins that are compiled ahead of time.
    """
    hint = "Install it: pip install 'nemo-build[tensorrt]'"
    try:
        plugin = importlib.import_module("tensorrt.plugin")
    except ImportError as error:
        raise UserError(f"TensorRT cannot be imported: {error}.", hint=hint) from error
    if not hasattr(plugin, "aot_impl"):
        raise UserError("This TensorRT has no plugins that are compiled ahead of time.", hint=hint)
    for node in made:
        if not hasattr(plugin.op, DOMAIN) or not hasattr(getattr(plugin.op, DOMAIN), node.name):
            _Functions(plugin, node).register()


def plugin_id(node: Node) -> str:
    """A node's name with its namespace, as plugins are registered."""
    return f"{DOMAIN}::{node.name}"


def launchable(node: Node, sm: int) -> list[int]:
    """Tactics that an architecture has the instructions for, and that need no shared memory to be asked for.

    Raises:
        UserError: The architecture has none, or kernels are not compiled for it.
    """
    limit = SHARED_UNASKED * 1024
    found = [t for t in node.tactics(sm) if compile_kernel(node.kernels[t - 1], sm).shared <= limit]
    if not found:
        raise UserError(
            f"On sm_{sm} every kernel of {node.name} needs more than {SHARED_UNASKED} KiB of shared memory.",
            hint="Choose another backend for this GPU.",
        )
    return found


class _Functions:
    """What TensorRT calls of a node. It checks signatures, which are therefore made to measure."""

    def __init__(self, plugin: Any, node: Node) -> None:
        self._plugin, self._node = plugin, node
        self._names = [f"{t.name}_" if t.name in _TAKEN else t.name for t in node.inputs]

    def register(self) -> None:
        plugin, node, count = self._plugin, self._node, len(self._names)
        described = dict.fromkeys(self._names, plugin.TensorDesc)
        returned = GenericAlias(tuple, (plugin.TensorDesc,) * len(node.outputs))

        def describe(*given: Any, sm: int) -> Any:
            node.tactics(sm)
            return self._outputs(given)

        def autotune(*given: Any) -> Any:
            types = ",".join(TYPES[t.dtype] for t in (*node.inputs, *node.outputs))
            return [plugin.AutoTuneCombination(types, "LINEAR", launchable(node, given[count]))]

        def implement(*given: Any) -> Any:
            *_, sm, _, tactic = given
            return self._launch(given[:count], node.kernels[tactic - 1], sm)

        tactics = GenericAlias(list, (plugin.AutoTuneCombination,))
        code = GenericAlias(tuple, (str, str, plugin.KernelLaunchParams, plugin.SymIntExprs))
        self._sign(describe, {**described, ATTRIBUTE: int}, returned)
        self._sign(autotune, {**described, ATTRIBUTE: int, "outputs": None}, tactics)
        self._sign(implement, {**described, ATTRIBUTE: int, "outputs": None, "tactic": int}, code)
        plugin.register(plugin_id(node))(describe)
        plugin.autotune(plugin_id(node))(autotune)
        plugin.aot_impl(plugin_id(node))(implement)

    @staticmethod
    def _sign(function: Any, annotations: Mapping[str, Any], returned: Any) -> None:
        """Give a function the signature that TensorRT reads."""
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        parameters = [inspect.Parameter(n, kind, annotation=a or empty) for n, a in annotations.items()]
        function.__signature__ = inspect.Signature(parameters, return_annotation=returned)

    def _outputs(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Descriptors of the outputs, from those of the inputs."""
        plugin, node = self._plugin, self._node
        sizes, inputs = self._sizes(given), dict(zip((t.name for t in node.inputs), given, strict=True))
        made = []
        for tensor in node.outputs:
            if tensor.alias is not None:
                made.append(inputs[tensor.alias].aliased())
                continue
            shape = tuple(_expression(resolve(d, sizes)) for d in tensor.shape)
            made.append(plugin.from_shape_expr(shape, _data_type(tensor.dtype)))
        return tuple(made)

    def _launch(self, given: Sequence[Any], kernel: Kernel, sm: int) -> tuple[str, str, Any, Any]:
        """Name and code of the kernel, how it is launched, and its 32-bit integers."""
        plugin, sizes = self._plugin, self._sizes(given)
        binary = compile_kernel(kernel, sm)
        grid = dict(zip(("grid_x", "grid_y", "grid_z"), map(_expression, kernel.grid(sizes)), strict=True))
        launch = plugin.KernelLaunchParams(**grid, block_x=binary.num_warps * _WARP, shared_mem=binary.shared)
        extra = tuple(plugin.SymInt32(_expression(sizes[n])) for n in kernel.sizes)
        return binary.entry, plain_ptx(kernel, binary), launch, plugin.SymIntExprs.from_tuple(extra)

    def _sizes(self, given: Sequence[Any]) -> dict[str, Any]:
        """The sizes that shapes give, as expressions.

        Raises:
            ValueError: A tensor has another type or rank than the kernels take, or a known dimension does not fit.
        """
        sizes: dict[str, Any] = {}
        for tensor, desc in zip(self._node.inputs, given, strict=True):
            dims = list(desc.shape_expr)
            known = [None if d.is_fake or not d.is_constant else d.constant_value() for d in dims]
            wrong = len(dims) != len(tensor.shape) or desc.dtype != _data_type(tensor.dtype)
            if not wrong:
                pairs = zip(tensor.shape, known, strict=True)
                wrong = any(isinstance(d, int) and n not in (d, None) for d, n in pairs)
            if wrong:
                takes = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(
                    f"{plugin_id(self._node)}: `{tensor.name}` is {desc.dtype} {known} for {takes}."
                )
            for dim, expression in zip(tensor.shape, dims, strict=True):
                if isinstance(dim, str):
                    sizes.setdefault(dim, _Size(expression))
        return sizes


class _Size:
    """A symbolic size that also accepts numbers on its left, as TensorRT's expressions do not."""

    def __init__(self, expression: Any) -> None:
        self.expression = expression

    def _with(self, operation: str, other: Any) -> _Size:
        return _Size(getattr(self.expression, operation)(_expression(other)))

    def __add__(self, other: Any) -> _Size:
        return self._with("__add__", other)

    def __mul__(self, other: Any) -> _Size:
        return self._with("__mul__", other)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Any) -> _Size:
        return self._with("__sub__", other)

    def __rsub__(self, other: Any) -> _Size:
        return self._with("__mul__", -1)._with("__add__", other)

    def __floordiv__(self, other: Any) -> _Size:
        return self._with("__floordiv__", other)


def _expression(size: Any) -> Any:
    """What TensorRT takes for a size: an expression or a number."""
    return size.expression if isinstance(size, _Size) else size


def _data_type(dtype: str) -> Any:
    """TensorRT's constant for an element type."""
    constants = importlib.import_module("tensorrt").DataType
    return getattr(constants, {"float32": "FLOAT", "float16": "HALF"}.get(dtype, TYPES[dtype]))


def plain_ptx(kernel: Kernel, binary: Binary) -> str:
    """A kernel's PTX with no more parameters than the kernel is described with.

    Triton appends pointers to scratch memory. TensorRT passes inputs, integers and outputs and documents nothing after
    them; a launch with fewer arguments than parameters reads what lies behind. The kernels here ask for no such memory
    and never read the pointers, so their declarations can go.

    Raises:
        ValueError: The kernel uses one, or has other parameters than described.
    """
    found = re.search(rf"(\.entry {re.escape(binary.entry)}\()(.*?)(\n\))", binary.ptx, re.DOTALL)
    declared = found[2].split(",") if found else []
    own = len(kernel.inputs) + len(kernel.sizes) + len(kernel.outputs)
    if found is None or len(declared) != own + len(binary.hidden):
        raise ValueError(f"{kernel.label} has {len(declared)} parameters, described are {own}.")
    after = binary.ptx[found.end() :]
    for hidden, declaration in zip(binary.hidden, declared[own:], strict=True):
        used = re.search(rf"\b{re.escape(declaration.split()[-1])}\b", after)
        if hidden.bytes_per_program or used:
            raise ValueError(f"{kernel.label} uses {hidden.name}, which TensorRT does not pass.")
    return binary.ptx[: found.start(2)] + ",".join(declared[:own]) + binary.ptx[found.start(3) :]
