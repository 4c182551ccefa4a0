# SPDX-License-Identifier: Apache-2.0
"""A writer of ONNX nodes and constants, with the few shorthands that the op lowerings share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

FLOAT = int(onnx.TensorProto.FLOAT)
BFLOAT16 = int(onnx.TensorProto.BFLOAT16)
INT64 = int(onnx.TensorProto.INT64)

TO_END = np.iinfo(np.int64).max
"""End of a slice that takes all that follows."""


class Emitter:
    """Collects nodes and constants; names are unique and depend on nothing but the order of calls.

    Args:
        prefix: What names of constants begin with.
    """

    def __init__(self, prefix: str = "rtx_constant") -> None:
        self._prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.scope = ""
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def op(self, op_type: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        return self.ops(op_type, 1, *inputs, outputs=[out] if out else (), domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        count: int,
        *inputs: str,
        outputs: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node with `count` outputs, named `outputs` if given."""
        self._count += 1
        name = f"{self.scope}/{op_type.lower()}_{self._count}"
        names = list(outputs) or [name if count == 1 else f"{name}:{i}" for i in range(count)]
        node = onnx.helper.make_node(op_type, inputs, names, name=name, domain=domain, **attributes)
        self.nodes.append(node)
        return names

    def constant(self, array: NDArray[Any]) -> str:
        """A small constant; equal ones are one."""
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = f"{self._prefix}_{len(self._known)}"
            self.constants.append(onnx.numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def ints(self, *values: int) -> str:
        """An int64 vector."""
        return self.constant(np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """An int64 scalar."""
        return self.constant(np.array(value, np.int64))

    def number(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def cast(self, x: str, dtype: int) -> str:
        """`x` as another type."""
        return self.op("Cast", x, to=dtype)

    def reshape(self, x: str, *shape: int) -> str:
        """`x` in another shape; 0 keeps a dimension, -1 is what is left."""
        return self.op("Reshape", x, self.ints(*shape))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """`x` with dimensions of one at `axes` of the result."""
        return self.op("Unsqueeze", x, self.ints(*axes))

    def transpose(self, x: str, *order: int) -> str:
        """`x` with its dimensions in another order."""
        return self.op("Transpose", x, perm=list(order))

    def slice(self, x: str, start: int, end: int | str, axis: int) -> str:
        """Part of one dimension; `end` is a number or an int64 vector of one."""
        stop = self.ints(end) if isinstance(end, int) else end
        return self.op("Slice", x, self.ints(start), stop, self.ints(axis))

    def pad(self, x: str, rank: int, axis: int, before: int, after: int) -> str:
        """`x` with zeros before and after it along one dimension."""
        pads = [0] * (2 * rank)
        pads[axis], pads[rank + axis] = before, after
        return self.op("Pad", x, self.ints(*pads))

    def take(self, x: str, first: str, count: int) -> str:
        """``x[b, first[b] : first[b] + count]`` of `x` ``[B, S, C]`` and `first` ``[B]``: ``[B, count, C]``."""
        at = self.op("Add", self.unsqueeze(first, 1), self.ints(*range(count)))
        return self.op("GatherND", x, self.unsqueeze(at, 2), batch_dims=1)
