# SPDX-License-Identifier: Apache-2.0
"""Why an engine of this backend is not run."""

from __future__ import annotations

import ctypes.util

from nemo_build.engines.provenance import gpu_capabilities
from nemo_build.errors import BundleError


def refuse() -> BundleError:
    """The error for who wants to run an engine: what this machine lacks, and what this version does."""
    problems = []
    if ctypes.util.find_library("cuda") is None:
        problems.append("there is no CUDA driver here (libcuda)")
    if not gpu_capabilities():
        problems.append("there is no NVIDIA GPU here that nvidia-smi tells of")
    problems.append("this version builds and inspects TensorRT-RTX engines; it has no session that runs them")
    return BundleError(
        "The engine is for TensorRT-RTX and cannot be run here:",
        problems,
        "Build one with --target cpu to run it here.",
    )
