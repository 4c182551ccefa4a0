# SPDX-License-Identifier: Apache-2.0
"""The state a sequence keeps between steps, as graphs declare it and runtimes allocate it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

CACHES = ("key", "value")
"""Kinds of state that have a row for each position."""

RECURRENT = ("conv", "ssm", "ssm_pending")
"""Kinds of state that a step reads and writes whole."""

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class StateSpec:
    """One state buffer of a graph: an input and an output (``NAME.out``) that may share one buffer.

    Attributes:
        name: Name of the graph input.
        kind: One of :data:`RECURRENT` or :data:`CACHES`.
        shape: Dimensions; a string is a sum of numbers and of ``slots``, ``pending`` (tokens that a step may
            leave uncommitted) and ``context`` (positions of a cache), for example ``"3+pending"``.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``fp8`` (E4M3).
    """

    name: str
    kind: str
    shape: tuple[int | str, ...]
    dtype: str

    @property
    def output(self) -> str:
        """Name of the graph output that holds the state after a step."""
        return f"{self.name}.out"

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with ``slots``, ``pending`` and ``context`` replaced by `sizes`."""
        return tuple(_resolve(d, sizes) for d in self.shape)

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the buffer at `sizes`."""
        return math.prod(self.resolve(sizes)) * ITEM_SIZE[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Plain data, the inverse of :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateSpec:
        """The inverse of :meth:`to_json`."""
        return cls(data["name"], data["kind"], tuple(data["shape"]), data["dtype"])


def state_bytes(specs: Iterable[StateSpec], *, slots: int = 1, pending: int = 0, context: int = 0) -> int:
    """Bytes of all buffers together."""
    sizes = {"slots": slots, "pending": pending, "context": context}
    return sum(s.nbytes(sizes) for s in specs)


def declared_states(graphs: Iterable[Mapping[str, Any]]) -> list[StateSpec]:
    """The state buffers that graphs declare in a manifest, each once: two graphs of a drafter share theirs."""
    found = {s["name"]: s for graph in graphs for s in graph["state"]}
    return [StateSpec.from_json(s) for s in found.values()]


def stays_pending(tokens: int, pending: int) -> bool:
    """Whether the new tokens of a row stay pending, for the next step to commit as many of them as are accepted.

    A single one has no draft behind it, so that nothing can reject it; more than there is room for are part of
    a prompt.

    Args:
        tokens: New tokens of the row.
        pending: Tokens per slot that a step may leave uncommitted.
    """
    return 1 < tokens <= pending


def _resolve(dim: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return sum(int(term) if term.isdigit() else sizes[term] for term in dim.split("+"))
