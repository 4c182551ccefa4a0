# SPDX-License-Identifier: Apache-2.0
"""How each custom op becomes kernel nodes: one module an op, found by looking in this folder.

A module defines ``OP``, the op's name, and ``lower(k, c, node) -> None``, which emits what takes the node's place, as
modules of :mod:`nemo_build.engines.trt.ops` do. `k` is a :class:`KernelOps`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import onnx

from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable
from nemo_build.engines.gpu.weights import KernelWeights
from nemo_build.engines.trt.emitter import FLOAT
from nemo_build.engines.trt.ops import Context

ONNX_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
}
"""ONNX types of kernels' tensors."""


@cache
def kernel_modules() -> Mapping[str, ModuleType]:
    """All op modules by the op's name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.OP: m for m in modules}


class KernelOps:
    """What the lowerings of one graph share.

    Attributes:
        weights: The engine's weights.
        kernels: The graph's kernels.
        top_k: How many experts a token has, by the name of the value that holds the choices.
        values: Type and shape of what kernel nodes give, for those who read the graph.
    """

    def __init__(self, weights: KernelWeights, kernels: KernelTable, top_k: Mapping[str, int]) -> None:
        self.weights = weights
        self.kernels = kernels
        self.top_k = top_k
        self.values: list[onnx.ValueInfoProto] = []
        self.dtype = "float32" if weights.compute == FLOAT else "bfloat16"
        self._cast: dict[str, str] = {}
        self._slots = ""

    def cast(self, c: Context, x: str) -> str:
        """`x`, float32, in the type of activations; once for each value."""
        if x not in self._cast:
            self._cast[x] = c.to_compute(x)
        return self._cast[x]

    def slots(self, c: Context, lengths: str) -> str:
        """The slot of each row ``[B]``, which is the row."""
        if not self._slots:
            rows = c.g.op("Squeeze", c.g.op("Shape", lengths), c.g.ints(0))
            self._slots = c.g.op("Range", c.g.integer(0), rows, c.g.integer(1))
        return self._slots

    def launch(
        self,
        c: Context,
        op: str,
        launches: Sequence[str],
        attributes: Mapping[str, Any],
        dims: Mapping[str, int],
        values: Mapping[str, str],
        **outputs: str,
    ) -> dict[str, str]:
        """Add a kernel node; returns its outputs by the names of the kernel's parameters.

        Args:
            c: Where nodes go.
            op: The op that has the kernel.
            launches: Names of kernels of one node, the best first.
            attributes: See :meth:`~nemo_build.engines.gpu.kernel_nodes.KernelTable.use`.
            dims: Likewise.
            values: Values by the names of the kernel's parameters; there may be more than it has.
            outputs: Names for outputs that are to have one, such as those of the graph.

        Raises:
            ValueError: There is no such kernel.
        """
        node = self.kernels.use(op, attributes, dims, launches, self.dtype)
        inputs = [values[t.name] for t in node.inputs]
        names = [outputs.get(t.name, f"{c.g.scope}/{launches[-1]}.{t.name}") for t in node.outputs]
        c.g.ops(node.name, len(names), *inputs, outputs=names, domain=KERNEL_DOMAIN)
        for name, tensor in zip(names, node.outputs, strict=True):
            if tensor.alias is None:
                shape = [d if isinstance(d, int) else None for d in tensor.shape]
                self.values.append(onnx.helper.make_tensor_value_info(name, ONNX_TYPES[tensor.dtype], shape))
        return dict(zip((t.name for t in node.outputs), names, strict=True))
