# SPDX-License-Identifier: Apache-2.0
"""Kernel nodes become launches: nodes of the op ``nemo.gpu.Launch`` of ``plugins/gpu/ort``, which holds the contract.

What a launch is given follows from :class:`~nemo_build.plugins.gpu.kernel.Kernel` alone: shapes, sizes and the grid as
expressions in postfix notation over the names of the kernel's dimensions. Machine code is a constant of the graph, one
for all launches of a kernel, whose bytes are a file of the engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from nemo_build.bundle import Progress
from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable, KernelUse, suited
from nemo_build.errors import UserError
from nemo_build.plugins.gpu.compile import SHARED_LIMITS, Binary, compile_kernel
from nemo_build.plugins.gpu.kernel import Ceil, Dim, Kernel, Tensor, ceil_div

LAUNCH = "Launch"
"""The op type."""

FOLDER = "kernels"
"""Where in an engine machine code is."""

_WARP = 32


@dataclass(frozen=True)
class Compiled:
    """A kernel with its machine code."""

    kernel: Kernel
    binary: Binary

    @property
    def file(self) -> str:
        """Name of the file with the code, relative to the engine; its digest is part of it."""
        digest = hashlib.sha256(self.binary.cubin).hexdigest()[:12]
        stem = re.sub(r"\W+", "_", self.kernel.label).strip("_")
        return f"{FOLDER}/{stem}_{digest}.sm{self.binary.sm}.cubin"

    def attributes(self) -> dict[str, str | int]:
        """The attributes of a launch."""
        kernel, binary = self.kernel, self.binary
        order = [t.name for t in kernel.inputs]
        names = {d for t in kernel.inputs for d in t.shape if isinstance(d, str)}
        grid = kernel.grid({name: Postfix(name) for name in names})
        return {
            "kernel": kernel.label,
            "entry": binary.entry,
            "input_shapes": ";".join(_shape(t) for t in kernel.inputs),
            "sizes": ",".join(kernel.sizes),
            "output_shapes": ";".join(
                _shape(t) if t.alias is None else f"={order.index(t.alias)}" for t in kernel.outputs
            ),
            "grid": ",".join(str(side) for side in grid),
            "threads": binary.num_warps * _WARP,
            "shared": binary.shared,
            "hidden": len(binary.hidden),
        }


class Postfix:
    """A size that is not known yet: what is computed with it is an expression in postfix notation."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Any) -> Postfix:
        return Postfix(f"{self} {other} +")

    def __radd__(self, other: Any) -> Postfix:
        return Postfix(f"{other} {self} +")

    def __sub__(self, other: Any) -> Postfix:
        return Postfix(f"{self} {other} -")

    def __rsub__(self, other: Any) -> Postfix:
        return Postfix(f"{other} {self} -")

    def __mul__(self, other: Any) -> Postfix:
        return Postfix(f"{self} {other} *")

    def __rmul__(self, other: Any) -> Postfix:
        return Postfix(f"{other} {self} *")

    def __floordiv__(self, other: Any) -> Postfix:
        return Postfix(f"{self} {other} //")


def _shape(tensor: Tensor) -> str:
    return ",".join(_dim(d) for d in tensor.shape)


def _dim(dim: Dim) -> str:
    return str(ceil_div(Postfix(dim.size), dim.by)) if isinstance(dim, Ceil) else str(dim)


def compile_nodes(table: KernelTable, sm: int, progress: Progress | None = None) -> dict[str, Compiled]:
    """Machine code for the kernel nodes of a graph, by the nodes' names.

    Args:
        table: The graph's kernels.
        sm: The architecture, compute capability times ten.
        progress: Called with 1 for each.

    Raises:
        UserError: The architecture has no kernel for some of them; each is named.
    """
    found, problems = {}, []
    for name, use in table.uses.items():
        compiled = _first_that_fits(use, sm)
        if compiled is None:
            problems.append(name)
        else:
            found[name] = compiled
        if progress:
            progress(1)
    if problems:
        known = ", ".join(f"SM {known}" for known in SHARED_LIMITS)
        raise UserError(f"There are no kernels for SM {sm}:", problems, f"Kernels are compiled for {known}.")
    return found


def _first_that_fits(use: KernelUse, sm: int) -> Compiled | None:
    """The first kernel of those that suit a node that an architecture has instructions and memory for."""
    if sm not in SHARED_LIMITS:
        return None
    for kernel in suited(use, sm):
        binary = compile_kernel(kernel, sm)
        scratch = any(hidden.bytes_per_program for hidden in binary.hidden)
        if binary.shared <= SHARED_LIMITS[sm] << 10 and not scratch:
            return Compiled(kernel, binary)
    return None


def with_launches(model: onnx.ModelProto, compiled: Mapping[str, Compiled]) -> onnx.ModelProto:
    """A copy of a graph with a launch for each kernel node; code is external data in the kernels' files.

    Args:
        model: The lowered graph.
        compiled: Of each kernel node's op type, the kernel.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    used: dict[str, Compiled] = {}
    for node in copy.graph.node:
        if node.domain != KERNEL_DOMAIN:
            continue
        kernel = compiled[node.op_type]
        used[kernel.file] = kernel
        attributes = kernel.attributes()
        node.attribute.extend(onnx.helper.make_attribute(key, attributes[key]) for key in sorted(attributes))
        node.op_type = LAUNCH
        node.input.insert(0, kernel.file)
    copy.graph.initializer.extend(_code(kernel) for kernel in used.values())
    return copy


def _code(kernel: Compiled) -> onnx.TensorProto:
    """The constant with a kernel's machine code."""
    size = len(kernel.binary.cubin)
    tensor = onnx.TensorProto(name=kernel.file, data_type=onnx.TensorProto.UINT8, dims=[size])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", kernel.file), ("offset", 0), ("length", size)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def require_order(model: onnx.ModelProto) -> None:
    """Check that state may be written in place: whoever else reads a buffer has to run before it is written.

    ONNX Runtime runs nodes in any order that their inputs allow. So all other readers of an input whose buffer a node
    writes to have to be ancestors of that node.

    Raises:
        ValueError: Some are not; says which.
    """
    made_by = {name: i for i, node in enumerate(model.graph.node) for name in node.output if name}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(model.graph.node):
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(i)
    for i, node in enumerate(model.graph.node):
        for source in _overwritten(node):
            others = set(readers[source]) - {i}
            late = others - _ancestors(model.graph.node, made_by, i) if others else set()
            if late:
                names = ", ".join(model.graph.node[j].name for j in sorted(late))
                raise ValueError(f"{node.name} writes to {source} while {names} may still read it.")


def _overwritten(node: onnx.NodeProto) -> list[str]:
    """The inputs of a node whose buffers its outputs may share."""
    if node.op_type == "TensorScatter":
        return [node.input[0]]
    shapes = next((a.s.decode() for a in node.attribute if a.name == "output_shapes"), "")
    return [node.input[1 + int(s[1:])] for s in shapes.split(";") if s.startswith("=")]


def _ancestors(nodes: Sequence[onnx.NodeProto], made_by: Mapping[str, int], start: int) -> set[int]:
    """The nodes whose results a node depends on."""
    found: set[int] = set()
    left = [start]
    while left:
        for name in nodes[left.pop()].input:
            maker = made_by.get(name)
            if maker is not None and maker not in found:
                found.add(maker)
                left.append(maker)
    return found
