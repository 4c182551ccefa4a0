# SPDX-License-Identifier: Apache-2.0
"""Arrays that the processes of one server share: state buffers, and what drafters condition on.

Python models are processes of their own. What a step needs of another's memory, such as 48 MB of recurrent state a
sequence, must not travel as a tensor; so it lies in a file in memory that all of them map.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.errors import UserError

FOLDER = Path("/dev/shm")
"""Where files lie in memory (Linux: a file system of its own; containers get 64 MB of it unless told otherwise)."""

_PREFIX = "nemo-build"
_ALIGNMENT = 4096

_held: dict[Path, tuple[int, mmap.mmap]] = {}
"""Files that this process uses, and what is mapped of them. Each is locked for sharing, so that the last process to let
go can tell; a process has one lock, which its mapping keeps too."""

Layout = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of arrays by name."""


def shared_arrays(key: str, layout: Layout, folder: Path = FOLDER) -> dict[str, NDArray[Any]]:
    """The arrays of a key, the same for every process that asks; zeros at first.

    Args:
        key: Tells servers apart; see :func:`server_key`.
        layout: What there is, the same for all who ask with this key.
        folder: Where the file is.

    Raises:
        UserError: There is not enough memory for it.
    """
    total = sum(_nbytes(shape, dtype) for shape, dtype in layout.values())
    path = folder / f"{_PREFIX}-{key}"
    if path not in _held:
        file = _open(path)
        try:
            memory = _map(file, total, folder)
        except BaseException:
            os.close(file)
            raise
        _held[path] = file, memory
    _, memory = _held[path]
    arrays, offset = {}, 0
    for name, (shape, dtype) in layout.items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(memory, dtype, count, offset).reshape(shape)
        offset += _nbytes(shape, dtype)
    return arrays


def server_key(name: str) -> str:
    """A key for a model of the server that this process belongs to: all of its models have the same parent."""
    return f"{os.getppid()}-{name}"


def release(key: str, folder: Path = FOLDER) -> None:
    """This process has no more use for the arrays of a key; when no other has either, their file goes.

    Arrays stay good for as long as they live.
    """
    path = folder / f"{_PREFIX}-{key}"
    if path not in _held:
        return
    file, _ = _held.pop(path)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    os.close(file)


def leftovers(folder: Path = FOLDER) -> Iterator[Path]:
    """Files whose server is gone."""
    for path in folder.glob(f"{_PREFIX}-*"):
        process = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            yield path


def _open(path: Path) -> int:
    """Open or create a file of this user's, and lock it for sharing.

    Raises:
        UserError: It is somebody else's, or no file.
    """
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{path} cannot be opened: {error.strerror}.") from error
        fcntl.flock(file, fcntl.LOCK_SH)
        found = os.fstat(file)
        if found.st_uid != os.geteuid():
            os.close(file)
            raise UserError(f"{path} belongs to another user.", hint="Remove it.")
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == found.st_ino:
                return file
        os.close(file)  # its last user has just removed it


def _map(file: int, total: int, folder: Path) -> mmap.mmap:
    """The file's bytes, so many; raises UserError if there is not enough memory for them."""
    held = os.fstat(file).st_blocks * 512
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize + held
    if total > free:
        raise UserError(
            f"{folder} has room for {free / 1e6:.0f} MB; the sequences of this engine take {total / 1e6:.0f} MB.",
            hint="Give the container more (docker --shm-size, a memory-backed volume), or lower --max-sequences.",
        )
    os.ftruncate(file, total)
    return mmap.mmap(file, total)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
