# SPDX-License-Identifier: Apache-2.0
"""How an engine may hold its weights and what it may round, by the names that builds and manifests use."""

from __future__ import annotations

from collections.abc import Mapping

CONVERSIONS = ("bf16", "int8", "int4", "nvfp4")
"""Formats that a build can convert unquantized projections to."""

WEIGHTS: Mapping[str, str] = {
    "auto": "packed where the native kernels are to be had, else plain",
    "packed": "as stored, laid out for the native kernels",
    **{name: f"packed, and unquantized projections converted to {name}" for name in CONVERSIONS},
    "plain": "copied as stored; any ONNX Runtime runs the engine",
    "in-place": "not copied: hard links to the checkpoint's files",
}
"""How an engine may hold its weights."""

ACTIVATIONS = ("auto", "float32", "bfloat16", "int8")
"""What projections may round their inputs to."""
