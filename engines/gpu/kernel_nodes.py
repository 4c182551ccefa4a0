# SPDX-License-Identifier: Apache-2.0
"""Kernel nodes: places in a lowered graph that GPU kernels take, and how the kernels are found again.

A kernel node is an ONNX node of the domain :data:`KERNEL_DOMAIN`. Its op type is the name of a
:class:`~nemo_build.plugins.gpu.node.Node`, its inputs and outputs are that one's, in order, and it has no attributes.
The name says which code it is, and cannot be turned back into code; a :class:`KernelUse` beside the graph can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nemo_build.errors import BundleError
from nemo_build.plugins import gpu
from nemo_build.plugins.gpu.kernel import Kernel
from nemo_build.plugins.gpu.node import Node, nodes

KERNEL_DOMAIN = "nemo.gpu"
"""Domain of kernel nodes."""


@dataclass(frozen=True)
class KernelUse:
    """Where a kernel node's kernels come from; JSON has all of it.

    Attributes:
        op: The op type whose folder has the kernels.
        attributes: What ``kernels`` of the op's ``gpu`` module was called with; values are numbers and strings.
        dims: Likewise, the widths.
        node: Name of the node among those that the kernels make.
        launches: Names of those of the node's kernels that suit the graph's numbers of tokens, the best first; newer
            architectures may have a better one. A backend that times kernels may choose any of the node's.
    """

    op: str
    attributes: Mapping[str, Any]
    dims: Mapping[str, int]
    node: str
    launches: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "op": self.op,
            "attributes": dict(sorted(self.attributes.items())),
            "dims": dict(sorted(self.dims.items())),
            "node": self.node,
            "launches": list(self.launches),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> KernelUse:
        """The way back."""
        attributes, dims = dict(found["attributes"]), dict(found["dims"])
        return cls(found["op"], attributes, dims, found["node"], tuple(found["launches"]))


def load_node(use: KernelUse) -> Node:
    """The node with its kernels.

    Raises:
        BundleError: This version has no kernels of that name, because they have changed.
        UserError: Triton is not installed.
    """
    for node in _nodes(use.op, tuple(sorted(use.attributes.items())), tuple(sorted(use.dims.items()))):
        if node.name == use.node:
            return node
    raise BundleError(
        f"This version of nemo-build has other kernels of {use.op} than the engine was built with: {use.node}.",
        hint="Build the engine again.",
    )


def suited(use: KernelUse, sm: int) -> list[Kernel]:
    """The kernels that suit a graph and run on an architecture (compute capability times ten), the best first.

    Raises:
        BundleError, UserError: As :func:`load_node` does.
    """
    known = {k.name: k for k in load_node(use).kernels}
    return [known[launch] for launch in use.launches if known[launch].least_sm <= sm]


class KernelTable:
    """The kernels of one graph, as its lowering comes to need them.

    Attributes:
        uses: One for each node, by its name, in order of first use.
    """

    def __init__(self) -> None:
        self.uses: dict[str, KernelUse] = {}

    def use(
        self,
        op: str,
        attributes: Mapping[str, Any],
        dims: Mapping[str, int],
        launches: Sequence[str],
        dtype: str,
    ) -> Node:
        """The node that has some launches, in its variant for activations of a type.

        Args:
            op: The op type.
            attributes: What the op's kernels depend on; those that have their default are absent.
            dims: The widths that are compiled in, as the op's ``gpu`` module names them.
            launches: Names of kernels of one node, the best first.
            dtype: Type of the activations.

        Raises:
            UserError: Triton is not installed.
            ValueError: No kernels do what the attributes say.
        """
        for node in _nodes(op, tuple(sorted(attributes.items())), tuple(sorted(dims.items()))):
            if node.kernels[0].types["T"] != dtype or launches[0] not in {k.name for k in node.kernels}:
                continue
            use = KernelUse(op, dict(attributes), dict(dims), node.name, tuple(launches))
            known = self.uses.setdefault(node.name, use)
            assert known == use, "nodes of one graph are all for the same numbers of tokens"
            return node
        raise ValueError(f"No kernel is called {launches[0]} for {dtype}.")

    def nodes(self) -> list[Node]:
        """The nodes, in order of first use."""
        return [load_node(use) for use in self.uses.values()]

    def to_json(self) -> list[dict[str, Any]]:
        """What a manifest says of them."""
        return [use.to_json() for use in self.uses.values()]


@cache
def _nodes(
    op: str, attributes: tuple[tuple[str, Any], ...], dims: tuple[tuple[str, int], ...]
) -> tuple[Node, ...]:
    """All nodes of an op; making them takes time, and the layers of a model share them."""
    return tuple(nodes(gpu.kernels(op, dict(attributes), dict(dims))))
