# SPDX-License-Identifier: Apache-2.0
"""Tests on a real Triton server, which needs a virtual environment of its own: `scripts/test --all` makes it."""
