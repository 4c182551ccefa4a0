# SPDX-License-Identifier: Apache-2.0
"""The ops' CPU kernels: shared libraries of ONNX Runtime custom ops, one for each instruction set.

The libraries are compiled from ``plugins/*/cpu.cc`` and this folder. They are optional: where they were not built,
engines run the reference functions. Each is no Python module, only a library that ONNX Runtime loads by its path
(:func:`library`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from nemo_build import settings
from nemo_build.errors import UserError

INSTRUCTION_SETS = ("plain", "avx2", "avx512", "avx512vnni", "avx512bf16")
"""What the libraries are compiled for, best last."""

_forced: str | None = None


def library_file(name: str) -> Path | None:
    """The library of an instruction set, if it was built."""
    files = (Path(__file__).with_name(f"_{name}{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((f for f in files if f.is_file()), None)


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of an instruction set, for ctypes."""
    return ctypes.CDLL(str(library_file(name)))


@cache
def instruction_sets() -> tuple[str, ...]:
    """The sets that have been built and that this processor has, best last; empty if nothing was built."""
    if library_file("plain") is None:
        return ()
    try:
        supported = load("plain").nemo_supports
    except (OSError, AttributeError):
        return ()  # built for another processor, or from older sources
    return tuple(s for i, s in enumerate(INSTRUCTION_SETS) if supported(i) and library_file(s) is not None)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one instruction set, or "reference" for none, for sessions that are opened meanwhile in this process.

    Raises ValueError for a set that is not there.
    """
    global _forced
    if name != "reference" and name not in instruction_sets():
        raise ValueError(f"no kernels for {name!r}; there are {instruction_sets()}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def chosen() -> str | None:
    """The set in use: the best, or the one that ``NEMO_BUILD_ISA`` asks for; None means the references.

    Raises:
        UserError: ``NEMO_BUILD_ISA`` names a set that is not there.
    """
    there = instruction_sets()
    asked = _forced or settings.instruction_set()
    if asked is None:
        return there[-1] if there else None
    if asked == "reference":
        return None
    if asked not in there:
        raise UserError(
            f"NEMO_BUILD_ISA is {asked!r}, which is not to be had here.",
            [*there, "reference"],
            "Set it to one of these, or unset it.",
        )
    return asked


def library() -> Path | None:
    """Path of the library in use; None means the references."""
    name = chosen()
    return None if name is None else library_file(name)
