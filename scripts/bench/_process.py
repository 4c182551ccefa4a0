# SPDX-License-Identifier: Apache-2.0
"""Measuring in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(code: str, *arguments: object) -> dict[str, Any]:
    """Run Python code in a process of its own; its last line is JSON."""
    return _measured(["-c", code, *map(str, arguments)])


def run_file(script: Path, job: object) -> dict[str, Any]:
    """The same of a script that reads what it is to do, as JSON, from its standard input."""
    return _measured([str(script)], json.dumps(job))


def _measured(arguments: Sequence[str], given: str | None = None) -> dict[str, Any]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the measured process failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
