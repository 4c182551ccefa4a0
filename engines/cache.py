# SPDX-License-Identifier: Apache-2.0
"""The build cache: finished engines by the digest of everything that went into them."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nemo_build.bundle import publish, read_json, sha256_file, write_json
from nemo_build.settings import cache_directory

_DIGESTS = "digests.json"
_FRESH_SECONDS = 1.0


class EngineCache:
    """One entry of the cache, held by one process at a time.

    An entry's files are shared with the engines taken from it by hard links, and are read-only. What was stored
    is noted beside it (size, modification time and inode of each file), so that an entry whose files were written
    to in place, through an engine, is not taken for whole.

    Args:
        key: Digest of all that goes into the engine.
    """

    def __init__(self, key: str) -> None:
        self.entry = cache_directory() / "engines" / key
        self._note = self.entry.with_suffix(".json")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the entry; other processes that build the same engine wait."""
        self.entry.parent.mkdir(parents=True, exist_ok=True)
        with open(self.entry.with_suffix(".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def is_complete(self) -> bool:
        """Whether the engine is there and its files are those that were stored."""
        noted = read_json(self._note)
        return noted is not None and bool(noted == _identities(self.entry))

    def store(self, fill: Callable[[Path], None]) -> None:
        """Put an engine there; `fill` writes it into an empty directory."""
        self._note.unlink(missing_ok=True)
        with publish(self.entry) as directory:
            fill(directory)
            for name in _identities(directory):
                (directory / name).chmod(0o444)
        write_json(self._note, _identities(self.entry))

    def copy_to(self, destination: Path) -> None:
        """Fill an empty directory with hard links to the entry's files, or copies across file systems."""
        for name in _identities(self.entry):
            (destination / name).parent.mkdir(exist_ok=True)
            try:
                os.link(self.entry / name, destination / name)
            except OSError:
                shutil.copyfile(self.entry / name, destination / name)


class ContentDigests:
    """Sha256 of large files, remembered by identity (device, inode, size, modification time).

    A file whose identity has not changed is not read again; this is what makes the second build of an engine
    take no time. A file written within the last second is not remembered: another write might leave its
    modification time as it is.
    """

    def __init__(self) -> None:
        self._path = cache_directory() / _DIGESTS
        self._known: dict[str, str] = read_json(self._path) or {}

    def is_known(self, path: Path) -> bool:
        """Whether the digest of the file as it is now is remembered."""
        return _file_key(path) in self._known

    def digest(self, path: Path, progress: Callable[[int], None] | None = None) -> str:
        """Sha256 of the file's contents."""
        key = _file_key(path)
        if key not in self._known:
            digest = sha256_file(path, progress)
            if time.time() - path.stat().st_mtime < _FRESH_SECONDS:
                return digest
            self._known[key] = digest
            self._save()
        return self._known[key]

    def _save(self) -> None:
        """Remember, where the cache can be written; if not, the next build reads the files again."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._known)


def _identities(directory: Path) -> dict[str, Any]:
    """Size, modification time and inode of every file below a directory, by relative name."""
    found = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        status = path.stat()
        found[str(path.relative_to(directory))] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


def _file_key(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
