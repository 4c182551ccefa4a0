# SPDX-License-Identifier: Apache-2.0
"""The memory plan: what an engine keeps in memory at a batch and a context, before anything is built."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nemo_build.errors import PlanError
from nemo_build.state import StateSpec, state_bytes

_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine needs.

    Attributes:
        slots: Sequences at a time.
        context: Positions per sequence.
        pending: Tokens per sequence that a step may leave uncommitted.
        weights_file: Bytes of the weights on disk.
        weights_memory: Bytes of the weights in memory, in the form the backend computes with.
        state: Bytes of the state that does not grow with the context, all slots.
        cache: Bytes of the key/value caches, all slots at full context.
    """

    slots: int
    context: int
    pending: int
    weights_file: int
    weights_memory: int
    state: int
    cache: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights_memory + self.state + self.cache

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the total."""
        return {**asdict(self), "total": self.total}

    def require(self, available: int, where: str) -> None:
        """Raise PlanError with the arithmetic if the plan does not fit into `available` bytes."""
        if self.total <= available:
            return
        spare = available - self.weights_memory
        per_slot = (self.state + self.cache) // self.slots
        if spare < 0:
            hint = "The weights alone do not fit; it takes a machine with more memory."
        elif spare < per_slot:
            hint = "Not even one sequence fits: lower --max-context, or give it more memory."
        else:
            hint = f"{spare // per_slot} sequences of {self.context} positions would fit (--max-sequences)."
        raise PlanError(
            f"The engine does not fit {where}: it needs {_gib(self.total)}, there are {_gib(available)}.",
            [
                f"weights {_gib(self.weights_memory)} ({_gib(self.weights_file)} on disk)",
                f"recurrent state {_gib(self.state)} = {self.slots} sequences x {_gib(self.state // self.slots)}",
                f"key/value cache {_gib(self.cache)} = {self.slots} sequences x {self.context} positions",
            ],
            hint,
        )


def plan_memory(
    states: Iterable[StateSpec],
    *,
    slots: int,
    context: int,
    pending: int,
    weights_file: int,
    weights_memory: int,
) -> MemoryPlan:
    """Work out the plan for the state buffers of all graphs of an engine."""
    states = list(states)
    cache = [s for s in states if "context" in s.shape]
    rest = [s for s in states if "context" not in s.shape]
    return MemoryPlan(
        slots,
        context,
        pending,
        weights_file,
        weights_memory,
        state_bytes(rest, slots=slots, pending=pending),
        state_bytes(cache, slots=slots, context=context),
    )


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
