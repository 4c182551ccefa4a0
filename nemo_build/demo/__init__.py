# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoint that ships with the package: a small trained Nemotron-H in the released format, and drafters."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Directory of the demo checkpoint."""

DRAFTERS = {kind: Path(__file__).parent / "drafters" / kind for kind in ("dflash", "dspark")}
"""Directories of the drafters that were trained for it, by the name that ``--speculate`` takes."""
