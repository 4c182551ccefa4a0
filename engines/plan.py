# SPDX-License-Identifier: Apache-2.0
"""The memory plan: what an engine keeps in memory at a batch and a context, before anything is built."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_build.errors import PlanError
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec, state_bytes

PREFILL_CHUNK = 256
"""Most prompt tokens of a sequence in one step, unless a caller says otherwise."""

_GIB = 1 << 30

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine needs.

    Attributes:
        slots: Sequences at a time.
        context: Positions per sequence.
        weights_file: Bytes of the weights on disk.
        weights_memory: Bytes of the weights in memory, in the form the backend computes with.
        state: Bytes of the state that does not grow with the context, all slots.
        cache: Bytes of the key/value caches, all slots at full context.
        activations: Bytes of the largest intermediate results of a step: one in which all slots prefill, unless steps
            have a limit.
    """

    slots: int
    context: int
    weights_file: int
    weights_memory: int
    state: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights_memory + self.state + self.cache + self.activations

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the total."""
        return {**asdict(self), "total": self.total}

    def require(self, available: int, where: str) -> None:
        """Raise PlanError with the arithmetic if the plan does not fit into `available` bytes."""
        if self.total <= available:
            return
        spare = available - self.weights_memory
        per_slot = (self.state + self.cache + self.activations) // self.slots
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
                f"activations {_gib(self.activations)} of the largest step",
            ],
            hint,
        )


def plan_memory(
    spec: ModelSpec,
    states: Iterable[StateSpec],
    *,
    slots: int,
    context: int,
    weights_file: int,
    weights_memory: int,
    native: bool,
    pending: int = 0,
    step_tokens: int | None = None,
    activation_size: int = 4,
) -> MemoryPlan:
    """Work out the plan for the state buffers of all graphs of an engine.

    Args:
        spec: The model.
        states: The state buffers.
        slots: Sequences at a time.
        context: Positions per sequence.
        weights_file: Bytes of the weights on disk.
        weights_memory: Bytes of the weights in memory.
        native: Whether the kernels never hold the scores of a whole context.
        pending: Tokens of a sequence that a step may leave uncommitted.
        step_tokens: Tokens of a step at most; ``None``: a chunk of a prompt for each slot.
        activation_size: Bytes of an intermediate result.
    """
    states = list(states)
    cache = [s for s in states if "context" in s.shape]
    rest = [s for s in states if "context" not in s.shape]
    tokens = slots * min(PREFILL_CHUNK, context)
    tokens = tokens if step_tokens is None else min(tokens, max(step_tokens, slots))
    return MemoryPlan(
        slots,
        context,
        weights_file,
        weights_memory,
        state_bytes(rest, slots=slots, pending=pending),
        state_bytes(cache, slots=slots, context=context),
        activation_size * _activations(spec, tokens, 0 if native else context),
    )


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or "max"
    return min(limits)


def _activations(spec: ModelSpec, tokens: int, context: int) -> int:
    """Numbers alive at once in the widest block.

    The reference body of attention holds the scores over `context` positions three times (raw, masked, normalised),
    which dominate where it is long; the other blocks hold a few copies of their widest projection.
    """
    scores = 3 * spec.attention.num_heads * context if spec.attention else 0
    widths = [
        4 * spec.mamba.in_proj_size if spec.mamba else 0,
        2 * spec.mlp.intermediate_size if spec.mlp else 0,
        2 * spec.moe.shared_intermediate_size if spec.moe else 0,
        2 * spec.moe.top_k * (spec.hidden_size + spec.moe.intermediate_size) if spec.moe else 0,
    ]
    return tokens * (max(scores, *widths) + 4 * spec.hidden_size)


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
