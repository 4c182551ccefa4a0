# SPDX-License-Identifier: Apache-2.0
"""From an engine for GPUs to its sessions, or to all the reasons why it cannot be run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_build.engines.gpu.device import Device, cuda_device, obstacles
from nemo_build.engines.gpu.executor import Opener
from nemo_build.engines.gpu.session import Place
from nemo_build.errors import BundleError


@dataclass(frozen=True)
class GpuBackend:
    """A backend whose engines run on GPUs.

    Attributes:
        title: What people call it.
        open: Opens its graphs.
        missing: What it lacks here, besides a GPU.
        doubled: Kinds of state that its graphs read and write in different buffers.
        obstacles: Why there is no GPU here for engines of these compute capabilities.
        device: That GPU.
    """

    title: str
    open: Opener
    missing: Callable[[], list[str]]
    doubled: tuple[str, ...] = ()
    obstacles: Callable[[tuple[int, ...]], list[str]] = obstacles
    device: Callable[[tuple[int, ...]], Device] = cuda_device

    def require(self, manifest: Mapping[str, Any]) -> None:
        """Raise BundleError, with all reasons, if an engine of this backend cannot be run here."""
        problems = [*self.missing(), *self.obstacles(tuple(manifest["backend"]["sms"]))]
        if problems:
            raise BundleError(
                f"The engine is for {self.title} and cannot be run here:",
                problems,
                "Build one with --target cpu to run it here.",
            )

    def place(self, directory: Path, manifest: Mapping[str, Any]) -> Place:
        """Where an engine's graphs are to run. Raises BundleError if they cannot."""
        self.require(manifest)
        device = self.device(tuple(manifest["backend"]["sms"]))
        return Place(directory, manifest, device, self.open, self.doubled)
