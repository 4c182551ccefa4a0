# SPDX-License-Identifier: Apache-2.0
"""The mixers a layer can have: one module a block kind, found by looking in this folder.

A block module defines

- ``KIND``: its :class:`~nemo_build.spec.BlockKind`;
- ``tensors(spec) -> dict[str, TensorRule]``: what it needs of a checkpoint, by name below the layer's prefix;
- ``states(spec, prefix) -> tuple[StateSpec, ...]``: the state buffers of the layer;
- ``build(g, spec, prefix, x, step) -> ir.Value``: adds the mixer to a graph; ``x`` and the result ``[B, L, H]``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import onnx_ir as ir

from nemo_build.export.ledger import TensorRule
from nemo_build.spec import BlockKind

WEIGHT_DTYPES = ("BF16", "F16", "F32")
"""Safetensors dtypes in which an unquantized weight may be stored."""


def projection(shape: tuple[int, int], role: str) -> TensorRule:
    """The rule of a projection's weight ``[N, K]``, which a checkpoint may also store quantized."""
    return TensorRule(shape, WEIGHT_DTYPES, role, projection=True)


@dataclass(frozen=True)
class StepInputs:
    """The integers that every step carries; see the design's "step graph". All int64.

    ``input_ids`` is ``[B, L]``, ``logit_rows`` ``[R]`` (rows of the flattened ``[B*L]``), the rest ``[B]``.
    """

    input_ids: ir.Value
    lengths: ir.Value
    past: ir.Value
    accepted: ir.Value
    slots: ir.Value
    logit_rows: ir.Value


@cache
def blocks() -> Mapping[BlockKind, ModuleType]:
    """All block modules by kind."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.KIND: m for m in modules}
