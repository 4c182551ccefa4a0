# SPDX-License-Identifier: Apache-2.0
"""The plan before the build: what a model needs on a target, batch by context, and what fits at most.

Arithmetic on a bundle's manifest; nothing is written, and neither graphs nor weights are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.engines.footprint import TARGET, Footprint
from nemo_build.engines.options import CONVERSIONS, WEIGHTS
from nemo_build.engines.plan import MemoryPlan, host_memory, plan_memory
from nemo_build.engines.roofline import step_bytes
from nemo_build.engines.targets import (
    Speculation,
    Target,
    build_memory,
    builder_of,
    default_speculation,
    headroom,
    held_format,
    state_types,
    usable_bytes,
)
from nemo_build.errors import PlanError, UserError
from nemo_build.plugins import native
from nemo_build.spec import ModelSpec
from nemo_build.state import ITEM_SIZE, StateSpec, state_bytes

SEQUENCES = (1, 8, 32, 128)
"""Sequences at a time that a plan shows."""

CONTEXTS = (8192, 65_536, 262_144, 1_048_576)
"""Positions per sequence that a plan shows, up to the model's limit."""

STATE_TYPES = ("float32", "float16", "bfloat16")
"""In what recurrent states may be held."""

CACHE_TYPES = tuple(ITEM_SIZE)
"""In what keys and values may be held."""

GPU_STEP_TOKENS = 8192
"""Tokens of a step on a GPU; servers' usual budget."""

_MOST_SEQUENCES = 1 << 16
_DRAFTS_UNKNOWN = 7  # where the runtime chooses the draft length, as many as it may choose


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may be asked for.

    Attributes:
        sequences: Sequences at a time, each with each of `contexts`.
        contexts: Positions per sequence; ``None``: those of :data:`CONTEXTS` that the model has.
        memory: Bytes that may be used; ``None``: the target's, less its headroom.
        bandwidth: GB/s; ``None``: the target's.
        weights: A name of :data:`~nemo_build.engines.options.WEIGHTS`.
        state_type: One of :data:`STATE_TYPES`; ``None``: as the target holds them.
        cache_type: One of :data:`CACHE_TYPES`; ``None``: likewise.
        phases: Graphs of a step that have weights of their own, of a backend whose graphs do; ``None``: all.
    """

    sequences: tuple[int, ...] = SEQUENCES
    contexts: tuple[int, ...] | None = None
    memory: int | None = None
    bandwidth: float | None = None
    weights: str = "auto"
    state_type: str | None = None
    cache_type: str | None = None
    phases: int | None = None

    def check(self, target: Target, limit: int) -> None:
        """Raise UserError with all that makes no sense for a target and a model of so many positions."""
        problems = [
            f"--sequences has {n}; it must be at least 1"
            for n in self.sequences
            if not 1 <= n <= _MOST_SEQUENCES
        ]
        problems += [
            f"--context has {n}; the model allows 1 to {limit}"
            for n in self.contexts or ()
            if not 1 <= n <= limit
        ]
        kinds = tuple(WEIGHTS) if target.sm is None else ("auto", *CONVERSIONS)
        for option, value, known in (
            ("--weights", self.weights, kinds),
            ("--state-type", self.state_type, STATE_TYPES),
            ("--cache-type", self.cache_type, CACHE_TYPES),
        ):
            if value is not None and value not in known:
                problems.append(f"{option} is {value}; for {target.name} there are {', '.join(known)}")
        if problems:
            raise UserError("The plan cannot be made as asked:", problems)


@dataclass(frozen=True)
class Sizing:
    """What sequences cost beside some weights on a target, and how many of them fit.

    Attributes:
        spec: The model.
        states: State buffers of all graphs, in the types that the target holds them in.
        weights_file: Bytes of the weights as they are stored.
        weights_memory: Bytes of the weights in the target's memory.
        available: Bytes that all may take.
        pending: Tokens that a step may leave uncommitted, for each sequence.
        gpu: Whether steps have a limit of tokens and intermediate results 16 bits.
        state_copies: How often recurrent states are held.
        scores: Whether the scores of a whole context are held, as the reference functions do.
    """

    spec: ModelSpec
    states: tuple[StateSpec, ...]
    weights_file: int
    weights_memory: int
    available: int
    pending: int = 0
    gpu: bool = True
    state_copies: int = 1
    scores: bool = False

    def plan(self, sequences: int, context: int) -> MemoryPlan:
        """The memory plan."""
        plan = plan_memory(
            self.spec,
            self.states,
            slots=sequences,
            context=context,
            weights_file=self.weights_file,
            weights_memory=self.weights_memory,
            native=not self.scores,
            pending=self.pending,
            step_tokens=GPU_STEP_TOKENS if self.gpu else None,
            activation_size=2 if self.gpu else 4,
        )
        return replace(plan, state=self.state_copies * plan.state)

    def fits(self, sequences: int, context: int) -> bool:
        """Whether the plan fits."""
        return self.plan(sequences, context).total <= self.available

    def most_sequences(self, context: int) -> int:
        """Most sequences of so many positions that fit, up to 65,536."""
        return _most(lambda n: self.fits(n, context), _MOST_SEQUENCES)

    def longest_context(self, sequences: int = 1) -> int:
        """Most positions of each of some sequences that fit, up to the model's limit; 0 if not even one does."""
        return _most(lambda n: self.fits(sequences, n), self.spec.max_positions)


@dataclass(frozen=True)
class Cell:
    """One batch and context of a plan; bytes.

    Attributes:
        sequences: Sequences at a time.
        context: Positions of each.
        state: Recurrent state.
        pending: What drafts leave uncommitted, part of neither `state` nor `cache`.
        cache: Keys and values.
        activations: Intermediate results.
        total: With the weights.
        fits: Whether it fits.
        moved: Bytes that a step of decoding moves, without drafts.
        bound: Tokens per second of all sequences that the bandwidth allows; ``None`` where it is not known.
    """

    sequences: int
    context: int
    state: int
    pending: int
    cache: int
    activations: int
    total: int
    fits: bool
    moved: float
    bound: float | None


@dataclass(frozen=True)
class Forecast:
    """A plan for one target.

    Attributes:
        target: The device.
        options: What was asked for, with the types filled in.
        model: The weights as the target holds them.
        sizing: What sequences cost.
        bandwidth: GB/s of the bound; ``None`` if it is not known.
        speculation: How the target drafts with the bundle's graphs.
        cells: All batches and contexts.
    """

    target: Target
    options: PlanOptions
    model: Footprint
    sizing: Sizing
    bandwidth: float | None
    speculation: Speculation | None
    cells: tuple[Cell, ...]

    def require(self) -> None:
        """Raise PlanError, with the arithmetic, if not even the smallest of the batches and contexts fits."""
        if not any(cell.fits for cell in self.cells):
            least = min(self.cells, key=lambda c: c.total)
            self.sizing.plan(least.sequences, least.context).require(self.sizing.available, self.where())

    def where(self) -> str:
        """What the memory is, in words."""
        if self.options.memory is not None:
            return "the memory allowed"
        share = headroom(self.target)
        left = f" (less the {share:.0%} that a plan leaves free)" if share else ""
        return f"{self.target.product}{left}"

    def at_most(self) -> dict[int, int]:
        """Most sequences by context, for the contexts of the plan."""
        return {n: self.sizing.most_sequences(n) for n in sorted({cell.context for cell in self.cells})}

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "target": self.target.to_json(),
            "options": asdict(self.options),
            "weights": {
                name: [
                    {"group": group, "format": form, "bytes": nbytes}
                    for (group, form), nbytes in part.groups().items()
                ]
                for name, part in self.model.parts.items()
            },
            "weights_bytes": self.sizing.weights_memory,
            "available_bytes": self.sizing.available,
            "build_bytes": build_memory(self.target, self.sizing.weights_file),
            "bandwidth_gbs": self.bandwidth,
            "speculation": None if self.speculation is None else asdict(self.speculation),
            "cells": [asdict(cell) for cell in self.cells],
            "most_sequences": {str(context): n for context, n in self.at_most().items()},
            "longest_context": self.sizing.longest_context(),
            "bound": "computed from bytes and bandwidth, not measured",
        }


def forecast(bundle: Path, target: Target, options: PlanOptions | None = None) -> Forecast:
    """Plan a model bundle on a target.

    Raises:
        BundleError: It is no bundle, or its manifest does not say enough.
        UserError: An option makes no sense.
    """
    return forecast_model(Footprint.of_manifest(read_manifest(bundle, MODEL_BUNDLE)), target, options)


def forecast_model(stored: Footprint, target: Target, options: PlanOptions | None = None) -> Forecast:
    """The same for a footprint."""
    options = options or PlanOptions()
    limit = stored.spec.max_positions
    options.check(target, limit)
    contexts = options.contexts or tuple(n for n in CONTEXTS if n <= limit) or (limit,)
    state_type, cache_type = state_types(target)
    options = replace(
        options,
        contexts=contexts,
        state_type=options.state_type or state_type,
        cache_type=options.cache_type or cache_type,
    )
    if target.sm is None and options.weights == "auto" and native.chosen() is None:
        options = replace(options, weights="plain")
    model = stored.held(options.weights, lambda form: held_format(target, form))
    speculation = default_speculation(target, [p for p in model.parts if p != TARGET])
    bandwidth = options.bandwidth or target.bandwidth_gbs
    builder = builder_of(target)
    sizing = replace(
        sizing_on(
            target,
            model.spec,
            held_states(model.states, options.state_type, options.cache_type),
            model.nbytes_apart if builder is not None and builder.apart else model.nbytes,
            phases=options.phases,
        ),
        weights_file=stored.nbytes,
        available=available_bytes(target, options.memory),
        pending=_pending(model, speculation),
        scores=options.weights == "plain",
    )
    cells = tuple(_cell(model, sizing, options, bandwidth, n, c) for c in contexts for n in options.sequences)
    return Forecast(target, options, model, sizing, bandwidth, speculation, cells)


def sizing_on(
    target: Target,
    spec: ModelSpec,
    states: tuple[StateSpec, ...],
    weights: int,
    *,
    phases: int | None = None,
) -> Sizing:
    """What sequences cost beside some bytes of weights on a target, in the target's memory, without drafts."""
    builder = builder_of(target)
    copies = builder.weight_copies if builder else 1
    return Sizing(
        spec,
        states,
        weights,
        weights * (copies if phases is None else min(phases, copies)),
        available_bytes(target),
        gpu=target.sm is not None,
        state_copies=builder.state_copies if builder else 1,
    )


def require_all(plans: Sequence[Forecast]) -> None:
    """Raise PlanError, with the arithmetic of each, if there are plans of which nothing fits."""
    refused = []
    for plan in plans:
        try:
            plan.require()
        except PlanError as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise PlanError("\n".join(str(error) for error in refused))


def available_bytes(target: Target, memory: int | None = None) -> int:
    """Bytes that a plan may take: those allowed, else the target's less its headroom, else this machine's."""
    if memory is not None:
        return memory
    return host_memory() if target.memory_gb is None else usable_bytes(target)


def held_states(
    states: Sequence[StateSpec], state_type: str | None, cache_type: str | None
) -> tuple[StateSpec, ...]:
    """State buffers in other types; ``None``: as they are declared."""
    return tuple(
        replace(s, dtype=(cache_type if "context" in s.shape else state_type) or s.dtype) for s in states
    )


def _pending(model: Footprint, speculation: Speculation | None) -> int:
    """Tokens that a step may leave uncommitted: the drafts and the one before them."""
    if speculation is None or (speculation.name == "auto" and len(model.parts) == 1):
        return 0
    return (_DRAFTS_UNKNOWN if speculation.drafts is None else speculation.drafts) + 1


def _cell(
    model: Footprint,
    sizing: Sizing,
    options: PlanOptions,
    bandwidth: float | None,
    sequences: int,
    context: int,
) -> Cell:
    plan = sizing.plan(sequences, context)
    committed = [s for s in sizing.states if "context" not in s.shape]
    pending = plan.state - sizing.state_copies * state_bytes(committed, slots=sequences)
    own = held_states(model.parts[TARGET].states, options.state_type, options.cache_type)
    moved = step_bytes(model, own, sequences=sequences, context=context).total
    return Cell(
        sequences,
        context,
        plan.state - pending,
        pending,
        plan.cache,
        plan.activations,
        plan.total,
        plan.total <= sizing.available,
        moved,
        None if bandwidth is None else sequences * bandwidth * 1e9 / moved,
    )


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to a limit that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
