# SPDX-License-Identifier: Apache-2.0
"""The TensorRT-RTX backend: engines for consumer and workstation GPUs, built on any machine.

What an engine of it takes and gives is written down in ``docs/tensorrt_rtx.md``.
"""

NAME = "tensorrt-rtx"
"""The backend's name in an engine's manifest."""

VERSION = "1.7.1.116"
"""The version of the ``tensorrt-rtx`` distribution that this backend is written for; others are refused."""
