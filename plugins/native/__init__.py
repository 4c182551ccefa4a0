# SPDX-License-Identifier: Apache-2.0
"""The ops' CPU kernels: shared libraries of ONNX Runtime custom ops, one for each instruction set.

The libraries are compiled from ``plugins/*/cpu.cc`` and this folder. They are optional: where they were not built,
engines run the reference functions. Each is no Python module, only a library that ONNX Runtime loads by its path
(:func:`library`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from nemo_build import settings
from nemo_build.errors import UserError
from nemo_build.plugins import libraries
from nemo_build.plugins.libraries import REFERENCE, Forced

INSTRUCTION_SETS = ("plain", "avx2", "avx512", "avx512vnni", "avx512bf16")
"""What the libraries are compiled for, best last."""


def library_file(name: str) -> Path | None:
    """The library of an instruction set, if it was built."""
    return libraries.library_file(Path(__file__).parent, name)


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


forced = Forced(lambda: instruction_sets())
"""Use one instruction set for sessions that are opened meanwhile in this process; see :class:`Forced`."""


def chosen() -> str | None:
    """The set in use: the best, or the one that ``NEMO_BUILD_ISA`` asks for; None means the references.

    Raises:
        UserError: ``NEMO_BUILD_ISA`` names a set that is not there.
    """
    there = instruction_sets()
    asked = forced.name or settings.instruction_set()
    if asked is None:
        return there[-1] if there else None
    if asked == REFERENCE:
        return None
    if asked not in there:
        raise UserError(
            f"NEMO_BUILD_ISA is {asked!r}, which is not to be had here.",
            [*there, REFERENCE],
            "Set it to one of these, or unset it.",
        )
    return asked


def library() -> Path | None:
    """Path of the library in use; None means the references."""
    name = chosen()
    return None if name is None else library_file(name)
