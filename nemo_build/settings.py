# SPDX-License-Identifier: Apache-2.0
"""The only place where environment variables are read.

=====================  ==========================================================================
``NEMO_BUILD_CACHE``   Directory of the build cache (default: ``$XDG_CACHE_HOME/nemo-build`` or
                       ``~/.cache/nemo-build``).
``NEMO_BUILD_THREADS`` Threads of the CPU engine (default: the CPUs this process may use).
``NEMO_BUILD_ISA``     Instruction set of the CPU kernels: ``avx512bf16``, ``avx512vnni``, ``avx512``, ``avx2``,
                       ``plain``, or ``reference`` for none of them (default: the best this processor has).
=====================  ==========================================================================

OpenTelemetry has variables of its own, which its SDK reads. Here they only tell whether traces are wanted.
"""

from __future__ import annotations

import os
from pathlib import Path

from nemo_build.errors import UserError


def cache_directory() -> Path:
    """Directory of the build cache; it may not exist yet. Raises UserError if there is no home directory."""
    explicit = os.environ.get("NEMO_BUILD_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "nemo-build"
    except RuntimeError as error:
        hint = "Set NEMO_BUILD_CACHE to a directory for the build cache."
        raise UserError("There is no home directory for the build cache.", hint=hint) from error


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> int:
    """Threads of the CPU engine. Raises UserError for a value that is not a positive integer."""
    value = os.environ.get("NEMO_BUILD_THREADS")
    if value is None:
        return cpus()
    if not value.isdecimal() or int(value) == 0:
        raise UserError(f"NEMO_BUILD_THREADS is {value!r}; it must be a positive whole number.")
    return int(value)


def instruction_set() -> str | None:
    """Instruction set of the CPU kernels; None means the best there is."""
    return os.environ.get("NEMO_BUILD_ISA") or None


def traces() -> bool:
    """Whether OpenTelemetry's variables name a place for traces."""
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "none"
    return wanted and any(os.environ.get(name) for name in endpoints)
