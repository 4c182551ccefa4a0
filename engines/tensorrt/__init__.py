# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend: engines with kernels of our own as plugins, built on a GPU like the one they are for.

``docs/tensorrt.md`` says what it does, and what of it was verified.
"""

from nemo_build.engines.trt import Library

LIBRARY = Library(
    "tensorrt",
    "TensorRT",
    "tensorrt",
    "tensorrt-cu13",
    "11.4.0.106",
    "tensorrt",
    alternatives=("tensorrt",),  # of NVIDIA's archive, containers and JetPack
    exact=False,
)
