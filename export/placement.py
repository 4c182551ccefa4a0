# SPDX-License-Identifier: Apache-2.0
"""Where the graphs of a bundle find the weights: hard links inside it, or the checkpoints' own directories."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nemo_build.errors import UserError
from nemo_build.export.checkpoint import Checkpoint, TensorInfo

WeightsMode = Literal["auto", "link", "reference"]

WEIGHTS_FOLDER = "weights"


@dataclass(frozen=True)
class PlacedWeights:
    """Weights that graphs can refer to.

    Attributes:
        mode: ``link`` or ``reference``.
        folder: The directory below which a session finds them; None for the bundle's own.
        tensors: All checkpoints' tensors by their name in the graphs. ``file`` is the external-data location.
    """

    mode: str
    folder: str | None
    tensors: Mapping[str, TensorInfo]


def place_weights(
    sources: Mapping[str, Checkpoint], directory: Path, out: Path, wanted: WeightsMode
) -> PlacedWeights:
    """Make the shards of several checkpoints reachable from graphs in `directory`.

    Args:
        sources: The checkpoints. A key that is not empty goes, with a dot, before its tensors' names, and names the
            folder of its shards' links, since files of two checkpoints have equal names as a rule.
        directory: Where the bundle is written for now.
        out: What it will be called, for messages.
        wanted: As for :func:`~nemo_build.export.exporter.export_bundle`.

    Raises:
        UserError: The shards cannot be linked, or lie in several directories and cannot be referenced.
    """
    if wanted in ("auto", "link"):
        try:
            locations = _link(sources, directory)
            return PlacedWeights("link", None, _tensors(sources, locations))
        except OSError as error:
            if wanted == "link":
                raise UserError(
                    f"Cannot hard-link the checkpoint's shards into {out}: {error.strerror}.",
                    hint="Write the bundle to the file system of all checkpoints, or pass --weights reference.",
                ) from error
            shutil.rmtree(directory / WEIGHTS_FOLDER)
    folder = os.path.commonpath([checkpoint.folder() for checkpoint in sources.values()])
    locations = {
        (key, name): Path(os.path.relpath(shard.path_real, folder)).as_posix()
        for key, checkpoint in sources.items()
        for name, shard in checkpoint.files.items()
    }
    return PlacedWeights("reference", folder, _tensors(sources, locations))


def _link(sources: Mapping[str, Checkpoint], directory: Path) -> dict[tuple[str, str], str]:
    """Hard links to all shards; returns their locations by checkpoint and file. Raises OSError if one fails."""
    locations = {}
    for key, checkpoint in sources.items():
        folder = Path(WEIGHTS_FOLDER, key)
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for name, shard in checkpoint.files.items():
            os.link(shard.path_real, directory / folder / name)
            locations[key, name] = (folder / name).as_posix()
    return locations


def _tensors(
    sources: Mapping[str, Checkpoint], locations: Mapping[tuple[str, str], str]
) -> dict[str, TensorInfo]:
    """The tensors under their names in the graphs, with their locations."""
    return {
        (full := f"{key}.{name}" if key else name): replace(info, name=full, file=locations[key, info.file])
        for key, checkpoint in sources.items()
        for name, info in checkpoint.tensors.items()
    }
