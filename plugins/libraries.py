# SPDX-License-Identifier: Apache-2.0
"""What the native libraries have in common: finding their files, and choosing an instruction set for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

REFERENCE = "reference"
"""Stands for none of the instruction sets: what there is without a library."""


def library_file(folder: Path, name: str) -> Path | None:
    """The shared library ``_NAME`` in a folder, if it was built."""
    files = (folder / f"_{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((f for f in files if f.is_file()), None)


class Forced:
    """The instruction set that a process is made to use for a while.

    Args:
        available: Gives the sets that are there.

    Attributes:
        name: The set, :data:`REFERENCE`, or ``None`` while nothing is forced.
    """

    def __init__(self, available: Callable[[], tuple[str, ...]]) -> None:
        self.name: str | None = None
        self._available = available

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Use one instruction set, or :data:`REFERENCE`, in this process meanwhile: for tests and benchmarks.

        Raises ValueError for a set that is not there.
        """
        if name != REFERENCE and name not in self._available():
            raise ValueError(f"no kernels for {name!r}; there are {self._available()}")
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before
