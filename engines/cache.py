# SPDX-License-Identifier: Apache-2.0
"""The build cache: finished engines by the digest of everything that went into them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_build.bundle import ENGINE_BUNDLE, publish, sha256_file
from nemo_build.settings import cache_directory

_DIGESTS = "digests.json"


def engine_entry(key: str) -> Path:
    """Where the engine of this key is, or would be."""
    return cache_directory() / "engines" / key


def is_complete(entry: Path) -> bool:
    """Whether a cached engine is there with all its files at their full size."""
    try:
        sizes = json.loads((entry / ENGINE_BUNDLE).read_text(encoding="utf-8"))["sizes"]
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def link_tree(source: Path, destination: Path) -> None:
    """Fill the empty directory `destination` with hard links to `source`'s files, or copies across file systems."""
    for path in sorted(source.iterdir()):
        try:
            os.link(path, destination / path.name)
        except OSError:
            shutil.copyfile(path, destination / path.name)


class ContentDigests:
    """Sha256 of large files, remembered by identity (path, size, modification time, inode).

    A file whose identity has not changed is not read again; this is what makes the second build of an engine
    take no time.
    """

    def __init__(self) -> None:
        self._path = cache_directory() / _DIGESTS
        try:
            self._known: dict[str, dict[str, Any]] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def is_known(self, path: Path) -> bool:
        """Whether the digest of the file as it is now is remembered."""
        return self._known.get(str(path), {}).get("identity") == _identity(path)

    def digest(self, path: Path, progress: Callable[[int], None] | None = None) -> str:
        """Sha256 of the file's contents."""
        identity = _identity(path)
        if not self.is_known(path):
            self._known[str(path)] = {"identity": identity, "sha256": sha256_file(path, progress)}
            self._save()
        return str(self._known[str(path)]["sha256"])

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}.partial")
        temporary.write_text(json.dumps(self._known), encoding="utf-8")
        temporary.replace(self._path)


def store(key: str, fill: Callable[[Path], None]) -> Path:
    """Add an engine to the cache; `fill` writes it into an empty directory. Returns the entry."""
    entry = engine_entry(key)
    with publish(entry, force=True) as directory:
        fill(directory)
        for path in directory.iterdir():
            path.chmod(0o444)  # entries are shared with engine bundles by hard links
    return entry


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
