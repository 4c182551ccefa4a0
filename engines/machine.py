# SPDX-License-Identifier: Apache-2.0
"""What this machine's processor and GPUs say of themselves."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

_PATIENCE = 20
"""Seconds for ``nvidia-smi`` to answer."""


def processor() -> tuple[str, frozenset[str]]:
    """Name and features of the processor; the features are known on Linux only."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", platform.machine()), frozenset(flags.split())


def query_gpus(*fields: str) -> list[str]:
    """These fields of each GPU as ``nvidia-smi`` tells, a line each; empty if it has none to tell of, or is not here.

    Raises:
        OSError: It does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]
