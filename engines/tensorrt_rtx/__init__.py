# SPDX-License-Identifier: Apache-2.0
"""The TensorRT-RTX backend: engines for consumer and workstation GPUs, built on any machine.

What an engine of it takes and gives is written down in ``docs/tensorrt_rtx.md``.
"""

from nemo_build.engines.trt import Library

LIBRARY = Library("tensorrt-rtx", "TensorRT-RTX", "tensorrt_rtx", "tensorrt-rtx", "1.7.1.116", "rtx")
