# SPDX-License-Identifier: Apache-2.0
"""How a projection's weight is stored: one module a format, found by looking in this folder.

A format module defines, for a weight of N output rows and K input columns,

- ``NAME``: what the ops' attribute ``weight_format`` says;
- ``DTYPES``: safetensors dtypes of the stored ``weight``, by which a checkpoint's format is recognised;
- ``ACTIVATIONS``: what the input is rounded to (a name of :data:`ACTIVATIONS`) where the checkpoint has an
  ``input_scale`` for it;
- ``parts(shape) -> dict[str, Part]``: the stored tensors by suffix, ``weight`` first, in the order of the
  ops' inputs;
- ``dequantize(out, parts, like) -> str``: ONNX text that makes the float weight ``out [N, K]`` of the type of
  ``like``;
- ``decode(*parts) -> ndarray``: the same in NumPy, float32.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from nemo_build.plugins.formats import activations

INPUT_SCALE = "input_scale"
"""Suffix of the activation scale; a float32 scalar."""

SMOOTHING = "pre_quant_scale"
"""Suffix of what the channels of a projection's input are multiplied by before all else ``[K]`` (arXiv:2306.00978)."""

LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
"""Suffixes of A ``[r, K]`` and B ``[N, r]``, whose ``B (A x)`` is added to what a weight gives (arXiv:2411.05007).

These tensors are plain, and may lie beside a weight in any other format; ``x`` is smoothed and not rounded.
"""

ACTIVATIONS: Mapping[str, Callable[[str, str, str, str], str]] = {
    "none": activations.none,
    "fp8": activations.fp8,
    "nvfp4": activations.nvfp4,
}
"""``text(out, x, scale, tag)``: ONNX text that rounds ``x`` to the format and back; by ``activation_format``."""


@dataclass(frozen=True)
class Part:
    """One stored tensor: its shape, and the safetensors dtypes it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@cache
def formats() -> Mapping[str, ModuleType]:
    """All format modules by name."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if m.name != "activations"]
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return {m.NAME: m for m in modules}


@cache
def format_of(dtype: str) -> ModuleType | None:
    """The format whose ``weight`` is stored in this safetensors dtype."""
    return next((m for m in formats().values() if dtype in m.DTYPES), None)
