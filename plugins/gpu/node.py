# SPDX-License-Identifier: Apache-2.0
"""Nodes: kernels that a graph has as one operation, whichever backend launches them.

A node is one launch, in one or more variants with the same tensors. A backend either times the variants on its GPU or
takes the one that the graph's author names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from nemo_build.errors import UserError
from nemo_build.plugins.gpu.compile import PTX_VERSIONS
from nemo_build.plugins.gpu.kernel import Kernel, Tensor

_PROBES = (7, 1009)  # two numbers of anything between which a grid that depends on it changes


@dataclass(frozen=True)
class Node:
    """Kernels that read and write the same tensors; as tactics they are numbered from 1."""

    kernels: tuple[Kernel, ...]

    @cached_property
    def name(self) -> str:
        """Op and launch, for example ``SelectiveScanStep_bfloat16_0a1b2c3d``.

        The digest covers everything that code depends on but the architecture. Widths are compiled in, so nodes of
        different widths have different names; and what a backend keeps under a node's name, such as timings, is never
        that of a kernel which has since changed.
        """
        first = self.kernels[0]
        launch = "".join(word.capitalize() for word in first.stage.split("_"))
        digest = hashlib.sha256(repr([_facts(k) for k in self.kernels]).encode()).hexdigest()[:8]
        types = re.sub(r"\W", "_", "_".join(first.types.values()))
        return f"{first.op}{launch}_{types}_{digest}"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What every kernel reads."""
        return self.kernels[0].inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What every kernel writes."""
        return self.kernels[0].outputs

    def tactics(self, sm: int) -> list[int]:
        """Numbers of the kernels that an architecture has the instructions for.

        Raises:
            UserError: There is none, or kernels are not compiled for the architecture.
        """
        found = [i for i, kernel in enumerate(self.kernels, 1) if kernel.least_sm <= sm]
        if sm not in PTX_VERSIONS or not found:
            known = ", ".join(map(str, PTX_VERSIONS))
            raise UserError(f"{self.name} has no kernel for sm_{sm}.", hint=f"Kernels exist for {known}.")
        return found


def nodes(kernels: Iterable[Kernel]) -> list[Node]:
    """The nodes that kernels make, in their order: one for each stage of an op, in each variant of types.

    Args:
        kernels: Those of one node of a model, or of nodes that differ in what their labels say. Others, for example of
            two scans that clamp differently, are made into nodes by calls of their own.

    Raises:
        ValueError: Two kernels have the same label, or kernels of a stage have not the same tensors.
    """
    groups: dict[Any, list[Kernel]] = {}
    labels: set[str] = set()
    for kernel in kernels:
        if kernel.label in labels:
            raise ValueError(f"There are two kernels {kernel.label}.")
        labels.add(kernel.label)
        group = groups.setdefault((kernel.op, kernel.stage, *kernel.types.items()), [])
        group.append(kernel)
        if _tensors(kernel) != _tensors(group[0]):
            raise ValueError(f"{kernel.label} is of one stage with {group[0].label}, and has other tensors.")
    return [Node(tuple(group)) for group in groups.values()]


def _tensors(kernel: Kernel) -> tuple[Any, ...]:
    return kernel.inputs, kernel.sizes, kernel.outputs


def _facts(kernel: Kernel) -> tuple[Any, ...]:
    """All that the code and the launch of a kernel depend on, but the architecture."""
    few, many = _PROBES
    names = {d for t in kernel.inputs for d in t.shape if isinstance(d, str)}
    grids = [kernel.grid(dict.fromkeys(names, n)) for n in (few, many)]
    tensors = [astuple(t) for t in (*kernel.inputs, *kernel.outputs)]
    constants = sorted(kernel.constexprs.items())
    options = (kernel.num_warps, kernel.num_stages, kernel.least_ptx)
    return kernel.name, kernel.function.cache_key, kernel.sizes, tensors, constants, options, grids
