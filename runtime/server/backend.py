# SPDX-License-Identifier: Apache-2.0
"""What the server generates with: an engine in this process, or something that speaks for one elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.backends import engine_graphs
from nemo_build.runtime.async_engine import AsyncEngine
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.prefix_cache import PrefixCacheStatistics
from nemo_build.runtime.request import Request, Scheduling
from nemo_build.runtime.scheduler import SchedulerStatistics
from nemo_build.runtime.speculation.acceptance import Acceptance
from nemo_build.runtime.speculation.kinds import available_speculators
from nemo_build.runtime.stopping import FinishReason
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.spec import ModelSpec

if TYPE_CHECKING:
    from nemo_build.runtime.chat import ChatTemplate
    from nemo_build.runtime.sampling import TokenLogprobs

__all__ = [
    "PROBE_PRIORITY",
    "PROBE_SECONDS",
    "Backend",
    "BusyError",
    "EngineBackend",
    "Piece",
    "Statistics",
    "probe_params",
]

PROBE_SECONDS = 60.0
"""A probe that takes longer has failed."""

_COMPILING = 4
"""Requests with grammars that are prepared at a time."""

PROBE_PRIORITY = 1000
"""A probe is to be answered when all slots are taken, too."""


@dataclass(slots=True)
class Piece:
    """Something new of an answer: a token, or its end.

    Attributes:
        text: New text, possibly empty. The token that ends the text is not part of it.
        token_id: The token it came from; ``None`` where the end came without one.
        drafted: Whether the token was a draft that was accepted.
        more: Whether another piece is there already, so that both can be sent at once.
        logprobs: Of the token, if they were asked for.
        finish_reason: On the last piece: why the answer ended.
        matched: On the last piece: the stop string, or the id of the end token, that ended it.
        prompt_tokens: On the first piece: length of the prompt.
        cached_tokens: On the first piece: how many of these came from the prefix cache.
        queued: On the first piece: seconds for which the request waited for a slot.
        rejected: On the last piece: how many drafts were rejected, where that is known.
    """

    text: str
    token_id: int | None
    drafted: bool = False
    more: bool = False
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queued: float | None = None
    rejected: int = 0


@dataclass(frozen=True)
class Statistics:
    """What a backend does at the moment, and has done.

    Attributes:
        scheduler: Requests that run and wait, steps, preemptions, slots and memory.
        cache: The prefix cache.
        acceptance: What came of drafts.
    """

    scheduler: SchedulerStatistics
    cache: PrefixCacheStatistics = field(default_factory=PrefixCacheStatistics)
    acceptance: Acceptance = field(default_factory=Acceptance)


class Backend(Protocol):
    """What the server needs of an engine. All methods are for coroutines of one event loop."""

    @property
    def name(self) -> str:
        """What the model is called where the server is told no other name."""

    @property
    def target(self) -> str:
        """What the engine was built for."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises BundleError if there is none."""

    @property
    def default_params(self) -> SamplingParams:
        """What requests take that say nothing else."""

    @property
    def context(self) -> int:
        """Positions of a sequence."""

    @property
    def slots(self) -> int:
        """Sequences at a time."""

    @property
    def speculator(self) -> str | None:
        """Where drafts come from; ``None``: there are none."""

    @property
    def speculators(self) -> Sequence[str]:
        """Where they could come from."""

    async def start(self) -> None:
        """Called once, in the loop that everything else is called in."""

    async def close(self) -> None:
        """End what runs, and let go of everything."""

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling,
        *,
        skip_special_tokens: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """Generate. Closing the generator ends the request, and frees its slot before the next step.

        Control tokens are part of the text, unless they are to be skipped.

        Raises:
            RequestError: The request is invalid; raised for the first piece, before anything runs.
            BundleError: The engine fails.
            ConnectionError: It cannot be reached; busy with too much else, it raises BusyError.
        """

    async def check(self) -> None:
        """Generate a token. Raises whatever keeps it from that, TimeoutError if it takes too long."""

    def statistics(self) -> Statistics:
        """What it does at the moment, and has done. Never waits."""


def _begin(piece: Piece, request: Request) -> None:
    """Tell with the first piece of a request what is known of its prompt."""
    piece.prompt_tokens, piece.cached_tokens = request.prompt_tokens, request.cached_tokens or 0
    if request.admitted is not None:
        piece.queued = request.admitted - request.arrival


def probe_params(default: SamplingParams) -> SamplingParams:
    """How a probe generates, where requests generate so that say nothing else."""
    return replace(default, max_tokens=1, temperature=0.0)


class BusyError(Exception):
    """Whatever generates has too much to do and refuses the request; it may be sent again later."""


class EngineBackend:
    """An engine in this process; attributes and methods are those of :class:`Backend`.

    Args:
        engine: The engine.
        speculate: How it was opened: the name of a speculator, ``auto`` or ``none``.
    """

    def __init__(self, engine: Engine, *, speculate: str = "none") -> None:
        manifest = read_manifest(engine.directory, ENGINE_BUNDLE)
        self.engine = engine
        self.name = Path(engine.directory).resolve().name
        self.target: str = manifest["target"]
        self.spec, self.tokenizer = engine.spec, engine.tokenizer
        self.default_params = engine.default_params
        self.context, self.slots = engine.session.context, engine.session.slots
        self.speculators = tuple(available_speculators(engine_graphs(engine.directory, manifest)))
        chosen = self.speculators[0] if speculate == "auto" else speculate
        self.speculator = None if chosen == "none" else chosen
        self._front = AsyncEngine(engine)
        # Grammars may take seconds to compile; requests without one are not to wait for that.
        self._grammars = ThreadPoolExecutor(_COMPILING, "request")

    @property
    def template(self) -> ChatTemplate:
        return self.engine.template

    async def start(self) -> None:
        await self._front.__aenter__()

    async def close(self) -> None:
        await self._front.__aexit__(None, None, None)
        self._grammars.shutdown(wait=False, cancel_futures=True)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling,
        *,
        skip_special_tokens: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        pool = self._grammars if params.grammar is not None else None
        [request] = await asyncio.get_running_loop().run_in_executor(
            pool, self.engine.requests, [prompt], params, scheduling, skip_special_tokens
        )
        run = self._front.run(request)
        is_first = True
        try:
            async for chunk in run:
                piece = Piece(
                    chunk.text,
                    chunk.token_id,
                    chunk.drafted,
                    bool(request.events),
                    chunk.logprobs,
                    chunk.finish_reason,
                    chunk.matched,
                )
                if is_first:
                    _begin(piece, request)
                    is_first = False
                if piece.finish_reason is not None:
                    piece.rejected = request.rejected
                yield piece
        finally:
            await run.aclose()

    async def check(self) -> None:
        params = probe_params(self.default_params)
        scheduling = Scheduling(priority=PROBE_PRIORITY)
        async with asyncio.timeout(PROBE_SECONDS):
            pieces = [piece async for piece in self.stream([self._probe_token()], params, scheduling)]
        if not any(piece.token_id is not None for piece in pieces):
            raise RuntimeError("the engine ended a request without a token")

    def _probe_token(self) -> int:
        known = (self.tokenizer.bos_id, *self.engine.eos_ids)
        return next((token for token in known if token is not None), 0)

    def statistics(self) -> Statistics:
        return Statistics(self.engine.statistics(), self.engine.cache_statistics(), self.engine.acceptance)
