# SPDX-License-Identifier: Apache-2.0
"""Measuring in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys


def run(code: str, *arguments: object) -> dict[str, float]:
    """Run Python code in a process of its own; its last line is JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the measured process failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result
