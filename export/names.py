# SPDX-License-Identifier: Apache-2.0
"""Writing many numbered tensor names in few lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"0|[1-9][0-9]*")


Template = tuple[str | None, ...]  # the parts of a dotted name, with None for each number


def template(name: str) -> tuple[Template, tuple[int, ...]]:
    """Split a dotted name into its parts, None for those that are numbers, and the numbers.

    >>> template("layers.3.experts.12.up")
    (('layers', None, 'experts', None, 'up'), (3, 12))
    """
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if _NUMBER.fullmatch(part))
    return tuple(None if _NUMBER.fullmatch(part) else part for part in parts), numbers


def fill(parts: Template, texts: Iterable[str]) -> str:
    """The dotted name with one of `texts` for each number."""
    left = iter(texts)
    return ".".join(next(left) if part is None else part for part in parts)


def collapse(names: Iterable[str]) -> list[tuple[str, int]]:
    """Write names as ranges: (text, how many names it stands for), which together cover each name once.

    >>> collapse(["layers.0.a", "layers.1.a", "layers.3.a", "b"])
    [('b', 1), ('layers.{0,1,3}.a', 3)]
    """
    groups: dict[Template, list[tuple[int, ...]]] = {}
    for name in set(names):
        parts, numbers = template(name)
        groups.setdefault(parts, []).append(numbers)
    return sorted(
        (fill(parts, map(_ranges, box)), math.prod(map(len, box)))
        for parts, members in groups.items()
        for box in _boxes(members)
    )


def _boxes(members: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Cover distinct number tuples with disjoint products of sets, merging along the last axis first."""
    boxes: list[tuple[tuple[int, ...], ...]] = [tuple((n,) for n in member) for member in sorted(members)]
    for axis in reversed(range(len(members[0]))):
        merged: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for box in boxes:
            merged.setdefault(box[:axis] + box[axis + 1 :], []).extend(box[axis])
        boxes = [(*rest[:axis], tuple(sorted(ns)), *rest[axis:]) for rest, ns in merged.items()]
    return sorted(boxes)


def _ranges(numbers: tuple[int, ...]) -> str:
    """A sorted tuple of numbers as ``7``, ``{0..3}`` or ``{0,2,4..9}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(texts) + "}"
