# SPDX-License-Identifier: Apache-2.0
"""What checks look at: an engine, opened in whatever ways they need."""

from __future__ import annotations

import platform
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest, sha256_file, sha256_json
from nemo_build.engines.check.baseline import Key
from nemo_build.engines.check.checks import Skip
from nemo_build.engines.machine import processor, query_gpus
from nemo_build.engines.plan import host_memory
from nemo_build.engines.provenance import check_engine
from nemo_build.settings import cpus, instruction_set
from nemo_build.settings import threads as default_threads

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine


_SHAPE = ("architecture", "vocab_size", "hidden_size", "layers")
"""What of a model's spec makes it another model; all else that changes is a change of the same one."""

_SHARE = 0.5  # of the machine's memory that open engines may take


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
            sha256_json({name: spec[name] for name in _SHAPE})[:8],
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
        """The engine, opened with options of :meth:`nemo_build.runtime.engine.Engine.load`.

        It is kept for others who ask for the same, as long as there is memory for those that come after it.

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
            need = self.manifest["plan"]["total"]
            while self._open and need * (len(self._open) + 1) > _SHARE * host_memory():
                self._open.pop(next(iter(self._open)))
            self._open[key] = Engine.load(self.path, **options)
        return self._open[key]

    def speculating(self, **options: Any) -> Engine:
        """The same with the speculator."""
        return self.engine(speculate=self.speculator, **options)

    def _resolve(self, speculator: str) -> str:
        from nemo_build.engines.backends import engine_graphs
        from nemo_build.runtime.speculation.kinds import SPECULATORS, speculator_kind

        kind = speculator_kind(speculator, None, engine_graphs(self.path, self.manifest))
        return next((name for name, k in SPECULATORS.items() if k is kind), "none")

    @property
    def speculators(self) -> list[str]:
        """Names of all that the engine has the graphs for."""
        from nemo_build.engines.backends import engine_graphs
        from nemo_build.runtime.speculation.kinds import available_speculators

        return available_speculators(engine_graphs(self.path, self.manifest))


def machine() -> dict[str, Any]:
    """What figures of speed depend on beside the engine: plain data."""
    return {
        "processor": processor()[0],
        "architecture": platform.machine(),
        "cpus": cpus(),
        "threads": default_threads(),
        "instruction_set": instruction_set() or "best",
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Name and driver of each GPU; empty if there is none, or they do not answer."""
    try:
        return query_gpus("name", "driver_version")
    except OSError:
        return []
