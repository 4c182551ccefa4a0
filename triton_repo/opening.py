# SPDX-License-Identifier: Apache-2.0
"""An engine in several processes: what each of them opens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_build.engines.plan import PREFILL_CHUNK
from nemo_build.errors import PlanError
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.engine import Engine, end_ids
from nemo_build.runtime.opening import Opened, Opening, Options, prepare
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftSpec
from nemo_build.state import declared_states
from nemo_build.triton_repo.guided import GuidedEngine
from nemo_build.triton_repo.guides import Guides
from nemo_build.triton_repo.remote import (
    Models,
    RemoteRunner,
    RemoteSlots,
    RemoteSpeculation,
    RemoteSpeculator,
    Steps,
)
from nemo_build.triton_repo.shared import Layout, shared_arrays
from nemo_build.triton_repo.stages import Draft, Verify

_FEATURES = "features"


class Parts:
    """An engine whose state lies in shared memory, for the processes of one server.

    Args:
        directory: The engine.
        options: How it is opened, the same in every process; sampled drafts are coupled.
        key: Tells servers, and engines of one server, apart.

    Raises:
        PlanError: Not all sequences fit the memory at full context.
        BundleError, RequestError: As of :meth:`nemo_build.runtime.engine.Engine.load`.
        UserError: There is not enough shared memory.
    """

    def __init__(self, directory: Path, options: Options, key: str) -> None:
        self.directory = directory
        opening = prepare(directory, options)
        if opening.memory is not None:
            raise PlanError(
                "Not all sequences fit the memory at full context, which models in several processes need.",
                hint="Lower --max-sequences or --max-context.",
            )
        self._features = opening.kind.features if opening.kind else None
        self._arrays = shared_arrays(key, _layout(opening, self._features))
        files = replace(opening.files, sizes={**opening.files.sizes, "state": self._arrays})
        self.opening = replace(opening, files=files)

    def verify(self) -> Verify:
        """The target's part."""
        features = self._arrays.get(_FEATURES)
        return Verify(self.opening.target(), features, self._features, Guides(self._constraints))

    def draft(self) -> Draft:
        """The drafter's part."""
        return Draft(self.opening.drafter(), self._arrays.get(_FEATURES), Guides(self._constraints))

    def engine(self, models: Models) -> Engine:
        """The scheduler's part, and all in front of it.

        Args:
            models: Reaches the others, which are ready.
        """
        steps = Steps(models)
        choosing = ["verify"] if self.drafter is None else ["verify", f"draft_{self.drafter}"]
        return GuidedEngine(self.directory, self._open(steps), steps, choosing)

    def _constraints(self) -> Constraints:
        """Makes what requests obey, as an engine has it."""
        tokenizer = Tokenizer.load(self.directory)
        spec = ModelSpec.from_json(self.opening.files.manifest["spec"])
        return Constraints(tokenizer, spec.vocab_size, end_ids(spec, tokenizer))

    def _open(self, steps: Steps) -> Opened:
        opening, options = self.opening, self.opening.options
        graphs = opening.files.manifest["graphs"]
        sizes, drafter = opening.files.sizes, self.drafter
        target = declared_states([graphs["target"]])
        slots = RemoteSlots(
            sizes["slots"], sizes["context"], opening.pending, {s.name: self._arrays[s.name] for s in target}
        )
        speculation = None
        if drafter is not None:
            own = [s for s in opening.states if s.name not in slots.buffers]
            buffers = {s.name: self._arrays[s.name] for s in own}
            speculation = RemoteSpeculation(
                RemoteSpeculator(steps, drafter, own, buffers),
                opening.most_drafts,
                slots.slots,
                controller=opening.controller(),
                watch_all=options.prefix_cache > 0,
            )
        cache = opening.cache(speculation.remote if speculation is not None else None)
        runner = RemoteRunner(steps, slots, speculation, drafter, keep_all=cache is not None)
        scheduler = Scheduler(
            slots, speculation, cache=cache, token_budget=options.token_budget, runner=runner
        )
        return Opened(opening.files.manifest, slots, scheduler, cache)

    @property
    def drafter(self) -> str | None:
        """Name of the speculator, or ``None``."""
        return None if self.opening.kind is None else self.opening.options.speculate


def _layout(opening: Opening, features: str | None) -> Layout:
    """State buffers, and features of as many tokens of a slot as one step may have."""
    sizes = {**opening.files.sizes, "pending": opening.pending}
    layout: dict[str, tuple[tuple[int, ...], str]] = {
        s.name: (s.resolve(sizes), s.dtype) for s in opening.states
    }
    if features is not None:
        tokens = max(min(PREFILL_CHUNK, opening.options.token_budget), opening.pending)
        layout[_FEATURES] = ((sizes["slots"], tokens, _width(opening, features)), "float32")
    return layout


def _width(opening: Opening, features: str) -> int:
    """Numbers a token of what the drafter conditions on."""
    manifest: Mapping[str, Any] = opening.files.manifest
    hidden = ModelSpec.from_json(manifest["spec"]).hidden_size
    if features == "hidden":
        return hidden
    spec = DraftSpec.from_json(manifest["drafters"][opening.options.speculate]["spec"])
    return hidden * len(spec.taps)
