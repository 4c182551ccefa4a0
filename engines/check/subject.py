# SPDX-License-Identifier: Apache-2.0
"""What checks look at: an engine, opened in whatever ways they need."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest, sha256_file, sha256_json
from nemo_build.engines.check.baseline import Key
from nemo_build.engines.check.checks import Skip
from nemo_build.engines.provenance import check_engine, gpu_capabilities
from nemo_build.settings import instruction_set
from nemo_build.settings import threads as default_threads

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine


class Subject:
    """An engine that is checked.

    Args:
        engine: Its directory.
        speculator: What it speculates with; ``auto`` for the best it can, ``none``.
        before: The engine it is compared with, if that is at hand.
        reference: The model bundle it was built from, if that is at hand.

    Raises:
        BundleError: It is no engine, or is damaged.
    """

    def __init__(
        self,
        engine: Path,
        *,
        speculator: str = "auto",
        before: Path | None = None,
        reference: Path | None = None,
    ) -> None:
        self.path, self.before, self.reference = engine, before, reference
        self.manifest = read_manifest(engine, ENGINE_BUNDLE)
        check_engine(engine, self.manifest)
        self.speculator = self._resolve(speculator)
        self._open: dict[tuple[Any, ...], Engine] = {}

    @property
    def key(self) -> Key:
        """Which engines are alike."""
        options, spec = self.manifest["options"], self.manifest["spec"]
        return Key(
            str(self.manifest["target"]),
            str(self.manifest["backend"]["name"]),
            sha256_json(spec)[:8],
            str(options["weights"]),
            str(options["activations"]),
            self.speculator,
        )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What reports say of the engine, and baselines keep: plain data."""
        return {
            "name": self.path.resolve().name,
            "digest": sha256_file(self.path / ENGINE_BUNDLE)[:16],
            "target": self.manifest["target"],
            "backend": dict(self.manifest["backend"]),
            "options": dict(self.manifest["options"]),
            "speculator": self.speculator,
            "nemo_build": self.manifest["nemo_build"],
        }

    def engine(self, **options: Any) -> Engine:
        """The engine, opened with options of :meth:`nemo_build.runtime.engine.Engine.load`; kept for others who ask
        for the same.

        Raises:
            Skip: Its backend cannot run it on this machine.
        """
        from nemo_build.engines.backends import require_runnable
        from nemo_build.errors import BundleError
        from nemo_build.runtime.engine import Engine

        key = tuple(sorted(options.items()))
        if key not in self._open:
            try:
                require_runnable(self.path, self.manifest)
            except BundleError as error:
                raise Skip("; ".join([error.headline, *error.problems])) from error
            self._open[key] = Engine.load(self.path, **options)
        return self._open[key]

    def speculating(self, **options: Any) -> Engine:
        """The same with the speculator."""
        return self.engine(speculate=self.speculator, **options)

    def close(self) -> None:
        """Let go of all that was opened."""
        self._open.clear()

    def _resolve(self, speculator: str) -> str:
        from nemo_build.runtime.speculation.kinds import SPECULATORS, available_speculators, speculator_kind

        if speculator == "auto":
            return available_speculators(self.manifest["graphs"])[0]
        kind = speculator_kind(speculator, None, self.manifest["graphs"])
        return next((name for name, k in SPECULATORS.items() if k is kind), "none")


def machine() -> Mapping[str, Any]:
    """What figures of speed depend on beside the engine."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": default_threads(),
        "instruction_set": instruction_set() or "best",
        "gpus": [f"SM {sm}" for sm in gpu_capabilities()],
        "driver": _driver(),
    }


def fingerprint() -> str:
    """Digest of :func:`machine`, 8 hexadecimal digits."""
    return hashlib.sha256(repr(sorted(machine().items())).encode()).hexdigest()[:8]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _driver() -> str:
    """Version of NVIDIA's kernel module; empty without one."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text(encoding="utf-8").splitlines()[0] if path.is_file() else ""
