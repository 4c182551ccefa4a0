# SPDX-License-Identifier: Apache-2.0
"""What a version of a model of a repository is told about itself, by a file beside its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.bundle import read_json, write_json
from nemo_build.errors import BundleError
from nemo_build.triton_repo import FRONT

if TYPE_CHECKING:
    from nemo_build.triton_repo.opening import Parts

NAME = "settings.json"


@dataclass(frozen=True)
class RepositorySettings:
    """Settings of one version of one model.

    Attributes:
        role: ``generate``, ``verify``, ``accept`` or ``draft``.
        engine: The engine, seen from the version's folder, or an absolute path.
        key: Tells engines of one server apart.
        options: How the engine is opened, as of :class:`~nemo_build.runtime.opening.Options`.
        models: What the models of a step are called in this repository.
        in_process: Whether ``generate`` opens the engine itself, and there are no other models.
        most_waiting: Requests that may wait.
    """

    role: str
    engine: str
    key: str
    options: Mapping[str, Any]
    models: Mapping[str, str] = field(default_factory=dict)
    in_process: bool = False
    most_waiting: int = 256

    @property
    def all_models(self) -> list[str]:
        """What is to be loaded to serve this version, in this order."""
        return [*self.models.values(), FRONT]

    def parts(self, folder: Path, key: str) -> Parts:
        """The engine for several processes."""
        from nemo_build.runtime.opening import Options
        from nemo_build.triton_repo.opening import Parts

        return Parts(self.directory(folder), Options(**self.options), key)

    def directory(self, folder: Path) -> Path:
        """The engine's directory, of the version in `folder`."""
        return (folder / self.engine).resolve()

    def save(self, folder: Path) -> None:
        """Write them into a version's folder."""
        write_json(folder / NAME, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> RepositorySettings:
        """The inverse of :meth:`save`. Raises BundleError if they are not there, or damaged."""
        found = read_json(folder / NAME)
        try:
            return cls(**found)
        except TypeError as error:
            raise BundleError(f"{folder / NAME} is missing, damaged, or of another version.") from error
