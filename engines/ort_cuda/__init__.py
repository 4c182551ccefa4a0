# SPDX-License-Identifier: Apache-2.0
"""The backend of ONNX Runtime with its CUDA provider: engines for every GPU that kernels are compiled for.

Standard ops are the provider's own kernels; custom ops are launches of precompiled kernels, by an op of the library
:func:`library`. ``docs/onnxruntime_cuda.md`` has the rest.
"""

from __future__ import annotations

from pathlib import Path

from nemo_build.plugins import gpu
from nemo_build.plugins.libraries import library_file

NAME = "onnxruntime-cuda"
"""The backend's name in an engine's manifest."""

PROVIDER = "CUDAExecutionProvider"
"""ONNX Runtime's name of the provider."""


def library() -> Path | None:
    """The library with the op that launches kernels; None if it was not compiled when this package was installed."""
    return library_file(Path(gpu.__file__).parent, "launch")
