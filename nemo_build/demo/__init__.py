# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoint that ships with the package: a small trained Nemotron-H in the released format."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Directory of the demo checkpoint."""
