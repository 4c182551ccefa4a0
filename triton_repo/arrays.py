# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths as tensors, and named arrays as bytes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.runtime.sampling import TokenLogprobs
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


def to_logprobs(rows: Sequence[Sequence[TokenLogprobs] | None]) -> NDArray[np.float64]:
    """Log probabilities by row, ``[R, 1 + longest]``.

    The first number of a row is how many alternatives each token has, or -1: there is nothing in it. Of each token
    follow its log probability, and of each alternative the id and its log probability.
    """
    flat = []
    for row in rows:
        numbers: list[float] = [len(row[0].top) if row else NOTHING]
        for one in row or ():
            numbers += one.logprob, *itertools.chain.from_iterable(one.top)
        flat.append(numbers)
    out = np.zeros((len(flat), max(map(len, flat), default=1)))
    for place, numbers in zip(out, flat, strict=True):
        place[: len(numbers)] = numbers
    return out


def from_logprobs(array: NDArray[Any], tokens: Sequence[Sequence[int]]) -> list[list[TokenLogprobs] | None]:
    """The inverse of :func:`to_logprobs`; `tokens`: those that were chosen in each row."""
    found: list[list[TokenLogprobs] | None] = []
    for (count, *numbers), row in zip(array.tolist(), tokens, strict=True):
        if count == NOTHING:
            found.append(None)
            continue
        width = 1 + 2 * int(count)
        parts = [numbers[i * width : (i + 1) * width] for i in range(len(row))]
        found.append(
            [
                TokenLogprobs(token, part[0], tuple(zip(map(int, part[1::2]), part[2::2], strict=True)))
                for token, part in zip(row, parts, strict=True)
            ]
        )
    return found


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
