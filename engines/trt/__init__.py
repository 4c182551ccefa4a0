# SPDX-License-Identifier: Apache-2.0
"""What the backends of TensorRT and TensorRT-RTX share: lowering of graphs, networks, and building in a process."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from dataclasses import dataclass

from nemo_build.errors import UserError


@dataclass(frozen=True)
class Library:
    """One of the two libraries.

    Attributes:
        name: The backend's name in an engine's manifest.
        title: What people call it.
        module: Its Python module.
        distribution: The package that brings the module.
        version: The version that the backend is written for; others are refused.
        extra: The extra of this project that installs it.
        alternatives: Other distributions that bring the same module.
        exact: Whether other patch releases are refused too. Where they are not, an engine is still for the one that
            built it.
    """

    name: str
    title: str
    module: str
    distribution: str
    version: str
    extra: str
    alternatives: tuple[str, ...] = ()
    exact: bool = True

    def installed_version(self) -> str | None:
        """The version of the distribution that is installed, or of an alternative; None if there is none."""
        for name in (self.distribution, *self.alternatives):
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return None

    def accepts(self, version: str) -> bool:
        """Whether the backend is written for a version."""
        parts = 2 if not self.exact else None
        return version.split(".")[:parts] == self.version.split(".")[:parts]

    def require(self) -> str:
        """The version that is installed.

        Raises:
            UserError: The distribution is missing, or is of another version than the backend is written for.
        """
        found = self.installed_version()
        hint = (
            f"Install it: pip install 'nemo-build[{self.extra}]', "
            f"or pip install {self.distribution}=={self.version}."
        )
        if found is None:
            raise UserError(
                f"{self.title} engines need a package that is not installed: {self.distribution}.", hint=hint
            )
        if not self.accepts(found):
            known = self.version if self.exact else ".".join(self.version.split(".")[:2])
            raise UserError(
                f"{self.name} {found} is installed; this version of nemo-build knows {known} only.",
                hint=hint,
            )
        return found
