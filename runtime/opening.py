# SPDX-License-Identifier: Apache-2.0
"""From an engine bundle to open graphs and a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.backends import engine_graphs, pending_tokens, require_runnable, runs_on_host
from nemo_build.engines.plan import MemoryPlan, host_memory, plan_memory
from nemo_build.engines.provenance import check_engine
from nemo_build.engines.session import Session, Slots
from nemo_build.errors import PlanError, RequestError
from nemo_build.plugins import native
from nemo_build.runtime.memory import SlotMemory
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.scheduler import TOKEN_BUDGET, Scheduler
from nemo_build.runtime.speculation.base import Speculator
from nemo_build.runtime.speculation.drafting import Drafting
from nemo_build.runtime.speculation.kind import EngineFiles, SpeculatorKind
from nemo_build.runtime.speculation.kinds import ADAPTIVE_DRAFTS, speculator_kind
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.runtime.speculation.mtp import MtpSpeculator
from nemo_build.runtime.speculation.rounds import Speculation
from nemo_build.runtime.steps import RowRunner
from nemo_build.settings import threads as default_threads
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec, declared_states


@dataclass(frozen=True)
class Options:
    """How to open an engine; see :meth:`nemo_build.runtime.engine.Engine.load`."""

    max_sequences: int | None = None
    max_context: int | None = None
    threads: int | None = None
    speculate: str = "none"
    draft_length: int | None = None
    drafting: Drafting = "coupled"
    prefix_cache: int = 0
    token_budget: int = TOKEN_BUDGET
    memory: int | None = None

    def check(self) -> None:
        """Raise RequestError with all that is out of range."""
        least = {"threads": 1, "prefix_cache": 0, "token_budget": 1, "memory": 1}
        found = {name: getattr(self, name) for name in least}
        problems = [
            f"{name} is {value}; it must be at least {least[name]}"
            for name, value in found.items()
            if value is not None and value < least[name]
        ]
        if self.drafting not in get_args(Drafting):
            problems.append(
                f"drafting is {self.drafting!r}; it must be one of {', '.join(get_args(Drafting))}"
            )
        if problems:
            raise RequestError("The engine cannot be loaded as asked:", problems)


@dataclass(frozen=True)
class Opened:
    """An open engine.

    Attributes:
        manifest: Its manifest.
        session: The open target graph, or where its slots are.
        scheduler: Runs requests on it.
        cache: Its prefix cache, if it has one.
    """

    manifest: Mapping[str, Any]
    session: Slots
    scheduler: Scheduler
    cache: PrefixCache | None


@dataclass(frozen=True)
class Opening:
    """An engine that was found to be whole, and what of it is to be opened and how.

    Attributes:
        files: Opens its graphs.
        options: As given.
        kind: The speculator, if there is one.
        most_drafts: Drafts of a request in a step, at most.
        pending: Tokens of a slot that a step may leave uncommitted.
        states: State buffers of all its graphs.
        memory: What the requests that run may take; ``None``: all slots at full context are affordable.
    """

    files: EngineFiles
    options: Options
    kind: SpeculatorKind | None
    most_drafts: int
    pending: int
    states: list[StateSpec]
    memory: SlotMemory | None

    def target(self) -> Session:
        """The open target graph."""
        features = {self.kind.features: True} if self.kind and self.kind.features else {}
        files = self.files.in_turn(drafter=False) if self.kind else self.files
        session: Session = files.session("target", pending=self.pending, **features)
        return session

    def drafter(self) -> Speculator:
        """The open speculator."""
        assert self.kind is not None, "callers have seen to it"
        return self.kind.open(self.files.in_turn(drafter=True))

    def controller(self) -> DraftLengthController | None:
        """What chooses the number of drafts, unless it is fixed."""
        return DraftLengthController(self.most_drafts) if self.options.draft_length is None else None

    def cache(self, speculator: Speculator | None) -> PrefixCache | None:
        """The prefix cache, if one is wanted."""
        if not self.options.prefix_cache:
            return None
        lookahead = speculator.lookahead if speculator is not None else {}
        return PrefixCache(
            self.states, capacity=self.options.prefix_cache, pending=self.pending, lookahead=lookahead
        )


def prepare(directory: Path, options: Options) -> Opening:
    """Check an engine bundle and what is asked of it; errors are those of
    :meth:`nemo_build.runtime.engine.Engine.load`.
    """
    options.check()
    manifest = read_manifest(directory, ENGINE_BUNDLE)
    check_engine(directory, manifest)
    require_runnable(directory, manifest)
    slots, context = _sizes(manifest["options"], options.max_sequences, options.max_context)
    built = engine_graphs(directory, manifest)
    kind = speculator_kind(options.speculate, options.draft_length, built)
    most = ADAPTIVE_DRAFTS if options.draft_length is None else options.draft_length
    pending = pending_tokens(directory, manifest, most + 1 if kind else 0)
    graphs = ["target", *(kind.graphs if kind else ())]
    states = declared_states(built[name] for name in graphs)
    memory = None
    if runs_on_host(directory, manifest):
        memory = _memory(manifest, states, slots=slots, context=context, pending=pending, options=options)
    elif options.memory is not None:
        raise RequestError(
            "memory cannot be given for an engine on a GPU, where all its states are allocated at once.",
            hint="Lower max_sequences or max_context.",
        )
    threads = default_threads() if options.threads is None else options.threads
    files = EngineFiles(directory, manifest, {"slots": slots, "context": context, "threads": threads})
    return Opening(files, options, kind, most, pending, states, memory)


def open_engine(directory: Path, options: Options) -> Opened:
    """Open an engine bundle; errors are those of :meth:`nemo_build.runtime.engine.Engine.load`."""
    opening = prepare(directory, options)
    session = opening.target()
    speculation, runner = _speculation(opening, session)
    cache = opening.cache(speculation.speculator if speculation is not None else None)
    scheduler = Scheduler(
        session,
        speculation,
        cache=cache,
        memory=opening.memory,
        token_budget=options.token_budget,
        runner=runner,
    )
    return Opened(opening.files.manifest, session, scheduler, cache)


def _speculation(opening: Opening, session: Session) -> tuple[Speculation | None, RowRunner | None]:
    """Where drafts come from, and what computes rows, where that is not the usual."""
    if opening.kind is None:
        return None, None
    drafter, keep = opening.drafter(), opening.options.prefix_cache > 0
    settings: dict[str, Any] = {
        "controller": opening.controller(),
        "drafting": opening.options.drafting,
        "watch_all": keep,
    }
    if isinstance(drafter, MtpSpeculator) and not runs_on_host(
        opening.files.directory, opening.files.manifest
    ):
        from nemo_build.runtime.device_rounds import open_rounds

        found = open_rounds(session, drafter.session, opening.most_drafts, keep_all=keep, **settings)
        if found is not None:
            return found
    return Speculation(drafter, opening.most_drafts, session.slots, **settings), None


def _memory(
    manifest: Mapping[str, Any],
    states: list[StateSpec],
    *,
    slots: int,
    context: int,
    pending: int,
    options: Options,
) -> SlotMemory | None:
    """What sequences may take; None if all slots may be full. Raises PlanError if not even one may be."""
    available = host_memory() if options.memory is None else options.memory
    where = "this machine" if options.memory is None else "the memory it is given"

    spec = ModelSpec.from_json(manifest["spec"])

    def plan(slots: int) -> MemoryPlan:
        return plan_memory(
            spec,
            states,
            slots=slots,
            context=context,
            weights_file=manifest["plan"]["weights_file"],
            weights_memory=manifest["plan"]["weights_memory"],
            native=native.library() is not None,
            pending=pending,
        )

    every = plan(slots)
    if every.total + options.prefix_cache <= available:
        return None
    plan(1).require(available, where)
    left = available - every.weights_memory - every.activations - options.prefix_cache
    memory = SlotMemory.of(states, left, pending=pending)
    if left < memory.need(context):
        raise PlanError(
            f"Beside a prefix cache of {options.prefix_cache} bytes not even one sequence fits {where}.",
            hint="Make the cache smaller, or lower max_sequences or max_context.",
        )
    return memory


def _sizes(options: Mapping[str, int], sequences: int | None, context: int | None) -> tuple[int, int]:
    sequences = options["max_sequences"] if sequences is None else sequences
    context = options["max_context"] if context is None else context
    problems = []
    for name, value in (("max_sequences", sequences), ("max_context", context)):
        if not 1 <= value <= options[name]:
            problems.append(f"{name} is {value}; the engine was built for 1 to {options[name]}")
    if problems:
        raise RequestError("The engine cannot be loaded as asked:", problems)
    return sequences, context
