# SPDX-License-Identifier: Apache-2.0
"""nemo-build: turn Nemotron-H checkpoints into deployable engines."""

__version__ = "0.1.0"
