# SPDX-License-Identifier: Apache-2.0
"""The ops' GPU kernels, in the Triton language: what all of them share, and how they are found.

An op has GPU kernels if its folder has a ``gpu`` module, which exports

- ``kernels(attributes, dims) -> list[Kernel]``: its kernels for a node's attributes and widths, one for each launch
  and each variant of types;
- ``KERNELS``: those at the widths of the 30B release, which the tests compile for every architecture and
  ``docs/kernels.md`` lists.

``kernel`` describes a kernel, ``compile`` makes machine code of it, ``interpret`` runs it on NumPy arrays; neither
needs a GPU or a driver. Triton is the optional dependency ``nemo-build[gpu]``; nothing imports it until kernels are
asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from nemo_build.errors import UserError
from nemo_build.plugins.gpu.kernel import Kernel
from nemo_build.plugins.registry import plugins_by_name


@cache
def _module(op: str) -> ModuleType | None:
    """An op's ``gpu`` module, if it has one."""
    package = plugins_by_name()[op].reference.__module__.rpartition(".")[0]
    if importlib.util.find_spec(f"{package}.gpu") is None:
        return None
    try:
        return importlib.import_module(f"{package}.gpu")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        hint = "Install it: pip install 'nemo-build[gpu]'"
        raise UserError("GPU kernels need Triton, which is not installed.", hint=hint) from error


def kernels(op: str, attributes: Mapping[str, Any], dims: Mapping[str, int]) -> list[Kernel]:
    """The GPU kernels of an op; empty if it has none.

    Args:
        op: The op type.
        attributes: The node's attributes; what is absent has its default.
        dims: The widths that are compiled in, as the op's ``gpu`` module names them.

    Raises:
        UserError: Triton is not installed.
    """
    module = _module(op)
    return [] if module is None else list(module.kernels(attributes, dims))


def all_kernels() -> Sequence[Kernel]:
    """The kernels of all ops at the widths of the 30B release."""
    modules = [_module(op) for op in plugins_by_name()]
    return [kernel for module in modules if module is not None for kernel in module.KERNELS]
