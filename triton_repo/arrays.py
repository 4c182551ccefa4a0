# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths as tensors, and named arrays as bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.triton_repo.tensors import NOTHING

Tensors = Mapping[str, NDArray[Any]]


def to_rows(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Rows counted: ``[R, 1 + longest]``, each its length and then its numbers, filled up with -1."""
    out = np.full((len(rows), 1 + max([0, *map(len, rows)])), NOTHING, np.int32)
    for place, row in zip(out, rows, strict=True):
        place[0] = len(row)
        place[1 : 1 + len(row)] = row
    return out


def from_rows(array: NDArray[Any]) -> list[list[int]]:
    """The inverse of :func:`to_rows`."""
    return [row[1 : 1 + row[0]] for row in array.tolist()]


def pack(arrays: Tensors) -> NDArray[np.object_]:
    """Named arrays as byte strings: by turns a name and an array in NumPy's file format."""
    out = []
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        out += [name.encode(), file.getvalue()]
    return np.array(out, np.object_)


def unpack(strings: NDArray[np.object_]) -> dict[str, NDArray[Any]]:
    """The inverse of :func:`pack`."""
    values = list(strings.ravel())
    return {
        name.decode(): np.load(io.BytesIO(data), allow_pickle=False)
        for name, data in zip(values[::2], values[1::2], strict=True)
    }
