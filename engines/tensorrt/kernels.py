# SPDX-License-Identifier: Apache-2.0
"""The kernels of an engine: which one of a node's a plan gets, and whether this version has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_build.engines.gpu.kernel_nodes import KernelUse, load_node, suited
from nemo_build.engines.targets import Target
from nemo_build.errors import BundleError, UserError
from nemo_build.plugins.gpu.node import Node
from nemo_build.plugins.gpu.tensorrt import launchable


def chosen_node(use: KernelUse, sm: int) -> Node:
    """A node of one kernel: the first that suits the graph, is for the architecture, and can be launched.

    There is one so that TensorRT has nothing to choose. It times choices on contents that it makes up, and a kernel
    that takes a slot or an expert from them would read and write anywhere.

    Raises:
        UserError: None of the node's kernels is for the architecture.
        WorkerFailed: Triton refuses a kernel.
    """
    node = load_node(use)
    small = {node.kernels[number - 1].name: node.kernels[number - 1] for number in launchable(node, sm)}
    best = [kernel for kernel in suited(use, sm) if kernel.name in small]
    return Node(((best or list(small.values()))[0],))


def require_kernels(uses: Iterable[KernelUse], target: Target) -> None:
    """Raise UserError, with all of them, if there are kernels that the target's GPU has not the instructions for."""
    assert target.sm is not None, "kernels are for GPUs"
    problems = []
    for use in uses:
        try:
            load_node(use).tactics(target.sm)
        except UserError as error:
            problems.append(f"{use.op}: {error.headline}")
    if problems:
        raise UserError(f"There are kernels of the model that {target.name} cannot run:", problems)


def changed_kernels(uses: Iterable[Mapping[str, Any]]) -> list[str]:
    """Ops with kernels, as a manifest has them, that this version has no more, for their code is another.

    Raises:
        UserError: Triton is not installed.
    """
    changed: dict[str, None] = {}
    for use in map(KernelUse.from_json, uses):
        try:
            load_node(use)
        except (BundleError, KeyError, ValueError):  # the last two where they are told other widths than now
            changed[use.op] = None
    return list(changed)
