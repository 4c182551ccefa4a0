# SPDX-License-Identifier: Apache-2.0
"""How each custom op becomes standard ops: one module an op, found by looking in this folder.

A module defines ``OP``, the op's name, and ``lower(c, node) -> None``, which emits what takes the node's place: values
of the names of the node's outputs, from values of the names of its inputs. `c` is a :class:`Context`. Rows are slots:
the input ``slots`` is not looked at.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import onnx

from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT, Emitter
from nemo_build.engines.trt.phases import Phase
from nemo_build.errors import UserError

if TYPE_CHECKING:
    from nemo_build.engines.trt.forms import WeightTable


@cache
def op_modules() -> Mapping[str, ModuleType]:
    """All op modules by the op's name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.OP: m for m in modules}


@dataclass
class Context:
    """What a lowering works with.

    Attributes:
        g: Where nodes go.
        phase: Which of the graphs this is, with its sizes.
        weights: The engine's weights.
        shapes: Declared shape of each graph input and initializer; dimensions that vary are strings.
        used: Values of the portable graph that something reads.
        compute: ONNX type that projections and attention multiply in, bfloat16 or float32.
        overflows: Values of one int64 each, what a layer's experts were given beyond their capacity.
    """

    g: Emitter
    phase: Phase
    weights: WeightTable
    shapes: Mapping[str, tuple[int | str, ...]]
    used: Container[str]
    compute: int = BFLOAT16
    overflows: list[str] = field(default_factory=list)
    _memo: dict[str, str] = field(default_factory=dict)

    def to_compute(self, x: str) -> str:
        """`x`, float32, in the type of multiplications."""
        return x if self.compute == FLOAT else self.g.cast(x, self.compute)

    def to_float(self, x: str) -> str:
        """The way back."""
        return x if self.compute == FLOAT else self.g.cast(x, FLOAT)

    def commits(self, lengths: str) -> str:
        """Which rows commit their new tokens at once ``[B]``: those with one, or with more than may be pending."""
        if "commits" not in self._memo:
            beyond = self.g.op("Greater", lengths, self.g.integer(self.phase.pending))
            single = self.g.op("Equal", lengths, self.g.integer(1))
            self._memo["commits"] = self.g.op("Or", beyond, single)
        return self._memo["commits"]

    def is_new(self, past: str, accepted: str) -> str:
        """Which rows start a sequence ``[B]``."""
        if "is_new" not in self._memo:
            self._memo["is_new"] = self.g.op("Equal", past, accepted)
        return self._memo["is_new"]

    def is_active(self, lengths: str) -> str:
        """Which rows have new tokens ``[B]``."""
        if "is_active" not in self._memo:
            self._memo["is_active"] = self.g.op("Greater", lengths, self.g.integer(0))
        return self._memo["is_active"]

    def positions(self, past: str, like: str) -> str:
        """The tokens' positions ``[B, L]``, padding's too; `like` is any value ``[B, L, ...]``."""
        if "positions" not in self._memo:
            self._memo["positions"] = self.g.op("Add", self.g.unsqueeze(past, 1), self._time(like))
        return self._memo["positions"]

    def is_valid(self, lengths: str, like: str) -> str:
        """Which tokens are no padding ``[B, L, 1]``; `like` is any value ``[B, L, ...]``."""
        if "is_valid" not in self._memo:
            valid = self.g.op("Less", self._time(like), self.g.unsqueeze(lengths, 1))
            self._memo["is_valid"] = self.g.unsqueeze(valid, 2)
        return self._memo["is_valid"]

    def _time(self, like: str) -> str:
        """0 to L - 1."""
        steps = self.g.op("Squeeze", self.g.op("Shape", like, start=1, end=2), self.g.ints(0))
        return self.g.op("Range", self.g.integer(0), steps, self.g.integer(1))

    def next_ring(self, new: str, old: str, lengths: str) -> str:
        """The pending tokens after the step ``[B, K, F]``: `new` ``[B, L, F]`` of rows that leave theirs pending."""
        g, size = self.g, self.phase.pending
        head = g.slice(g.pad(new, 3, 1, 0, size), 0, size, 1)
        is_token = g.op("Less", g.ints(*range(size)), g.unsqueeze(lengths, 1))
        is_short = g.unsqueeze(g.op("Not", self.commits(lengths)), 1)
        return g.op("Where", g.unsqueeze(g.op("And", is_token, is_short), 2), head, old)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes as Python values."""
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def refuse(node: onnx.NodeProto, what: str) -> UserError:
    """The error for a node that this backend has no formulation of."""
    return UserError(f"This backend cannot build {node.op_type} at {node.name}: {what}.")
