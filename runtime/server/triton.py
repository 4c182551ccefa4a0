# SPDX-License-Identifier: Apache-2.0
"""A Triton server with an engine as what generates; see ``nemo-build triton`` and docs/triton.md.

Tokenizer and template are those of an engine bundle on this side; token ids go there, and tokens come back. The server
is asked for a report now and then, which has its statistics, and shows that it is there: if the process of its front
dies, requests that were open get no answer from Triton, so they are ended here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_build.bundle import ENGINE_BUNDLE, check_files, read_manifest
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime import triton_messages
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.prefix_cache import PrefixCacheStatistics
from nemo_build.runtime.request import Scheduling
from nemo_build.runtime.scheduler import SchedulerStatistics
from nemo_build.runtime.server.backend import (
    PROBE_PRIORITY,
    PROBE_SECONDS,
    BusyError,
    Piece,
    Statistics,
    probe_params,
)
from nemo_build.runtime.speculation.acceptance import Acceptance
from nemo_build.runtime.stopping import FinishReason
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.runtime.triton_async import AsyncTritonClient
from nemo_build.runtime.triton_messages import TritonError
from nemo_build.spec import ModelSpec

if TYPE_CHECKING:
    from nemo_build.runtime.chat import ChatTemplate

__all__ = ["TritonBackend"]

_log = logging.getLogger(__name__)

_LOOK = 1.0
"""Seconds between reports."""

_SLOW = 60.0
"""Seconds without a report after which the server is taken to be dead; its engine may be opening."""

_FIRST = 10.0
"""Seconds that are waited for the first report; it is asked for again and again after that."""

_Kind = TypeVar("_Kind")


class TritonBackend:
    """An engine behind a Triton server; attributes and methods are those of
    :class:`~nemo_build.runtime.server.backend.Backend`.

    Until the first report, sizes are those that the engine was built for.

    Args:
        directory: The engine that the server has, or a bundle with its files apart from the weights.
        address: The server: ``http://HOST:PORT`` or ``grpc://HOST:PORT``; HTTP if it does not say.

    Raises:
        BundleError: `directory` is no engine, or damaged.
        TritonError: The address is of another kind, or a package is not installed.
    """

    def __init__(self, directory: Path, address: str) -> None:
        manifest = read_manifest(directory, ENGINE_BUNDLE)
        check_files(directory, manifest["files"])
        self._directory = directory
        self._address = address if "://" in address else f"http://{address}"
        self._client = AsyncTritonClient(self._address)
        self._tokenizer_digest = manifest["files"]["tokenizer.json"]
        self.name = directory.resolve().name
        self.target: str = manifest["target"]
        self.spec = ModelSpec.from_json(manifest["spec"])
        self.tokenizer = Tokenizer.load(directory)
        self.context: int = manifest["options"]["max_context"]
        self.slots: int = manifest["options"]["max_sequences"]
        self.speculator: str | None = None
        self._calls: set[_Call] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._problem: Exception | None = None  # why the last report did not come
        self._is_other = False  # whether the server has another tokenizer
        self._statistics = Statistics(SchedulerStatistics(0, 0, 0, 0, self.slots, 0, 0))

    @property
    def speculators(self) -> tuple[str, ...]:
        """Where drafts could come from: the server has decided that."""
        return () if self.speculator is None else (self.speculator,)

    @property
    def default_params(self) -> SamplingParams:
        """What requests take that say nothing else."""
        return SamplingParams.of_checkpoint(self.spec.generation)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises BundleError if there is none."""
        from nemo_build.runtime.chat import ChatTemplate

        return ChatTemplate.load(self._directory)

    async def start(self) -> None:
        """Look at the server from now on; it need not be there yet."""
        await self._look(_FIRST)
        if self._is_other:
            raise self._mismatch()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End what runs."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        self._give_up()
        await self._client.close()

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling,
        *,
        skip_special_tokens: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        if self._is_other:
            raise self._mismatch()
        pieces = self._client.stream(
            prompt,
            params,
            timeout=scheduling.timeout,
            priority=scheduling.priority,
            salt=None if scheduling.salt is None else str(scheduling.salt),
            speculate=scheduling.speculate,
            skip_special_tokens=skip_special_tokens,
            details=True,
        )
        call = _Call(pieces)
        self._calls.add(call)
        try:
            while (found := await call.next()) is not None:
                for piece in _taken_apart(found):
                    yield piece
        except TritonError as error:
            raise self._as_backend_error(error) from error
        except TimeoutError as error:
            raise ConnectionError(f"{self._address}: the answer was lost: {self._problem}") from error
        finally:
            self._calls.discard(call)
            await pieces.aclose()

    async def check(self) -> None:
        params = probe_params(self.default_params)
        known = (self.tokenizer.bos_id, self.tokenizer.eos_id)
        token = next((t for t in known if t is not None), 0)
        if self._is_other:
            raise self._mismatch()
        try:
            # If the token is not there in time, that the request ends shows that the server works.
            async for _ in self._client.stream(
                [token], params, timeout=PROBE_SECONDS, priority=PROBE_PRIORITY
            ):
                pass
        except TritonError as error:
            if not error.busy or error.fault:
                raise self._as_backend_error(error) from error

    def statistics(self) -> Statistics:
        return self._statistics

    # --- watching --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            await self._look(_SLOW)

    async def _look(self, seconds: float) -> None:
        """Ask for a report; if the server is not there, nothing comes of what it was asked before."""
        try:
            report = await self._client.report(seconds)
            self._take(report)
        except (TritonError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, TritonError) and error.busy and not error.fault:
                return
            if self._problem is None:
                _log.error("the server that generates does not answer: %s", error)
            self._problem = error
            self._give_up()
            # Whatever ran does so no more, and proves nothing.
            scheduler = replace(self._statistics.scheduler, running=0, waiting=0)
            self._statistics = replace(self._statistics, scheduler=scheduler)
            return
        if self._problem is not None:
            _log.warning("%s answers again", self._address)
        self._problem = None

    def _take(self, report: Mapping[str, Any]) -> None:
        self._is_other = report["tokenizer"] != self._tokenizer_digest
        self.context, self.slots = report["context"], report["slots"]
        self.speculator = report["speculator"]
        self._statistics = Statistics(
            _known(SchedulerStatistics, report["scheduler"]),
            _known(PrefixCacheStatistics, report["cache"]),
            _known(Acceptance, report["acceptance"]),
        )

    def _give_up(self) -> None:
        for call in self._calls:
            call.give_up()

    def _mismatch(self) -> BundleError:
        return BundleError(
            f"{self._address} serves another model than {self._directory}: their tokenizers differ.",
            hint="Name the engine that its repository was made of.",
        )

    def _as_backend_error(self, error: TritonError) -> Exception:
        """An error as :class:`~nemo_build.runtime.server.backend.Backend` promises it."""
        if error.fault:
            return ConnectionError(str(error))
        if error.busy:
            return BusyError(error.said)
        return RequestError(error.said, error.problems, error.hint)


class _Call:
    """A request whose next piece is waited for, and that can be told that there will be none.

    Args:
        pieces: What comes of it.
    """

    def __init__(self, pieces: AsyncGenerator[triton_messages.Piece, None]) -> None:
        self._pieces = pieces
        self._patience: asyncio.Timeout | None = None
        self._is_lost = False

    async def next(self) -> triton_messages.Piece | None:
        """The next piece, or ``None`` behind the last. Raises TimeoutError if it was given up."""
        if self._is_lost:
            raise TimeoutError
        async with asyncio.timeout(None) as self._patience:
            try:
                return await anext(self._pieces)
            except StopAsyncIteration:
                return None
            finally:
                self._patience = None

    def give_up(self) -> None:
        """Nothing more will come."""
        self._is_lost = True
        if self._patience is not None:
            self._patience.reschedule(0)


def _taken_apart(found: triton_messages.Piece) -> list[Piece]:
    """What came at once, token by token."""
    details = found.details
    assert details is not None, "they were asked for"
    pieces: list[Piece] = []
    start = 0
    logprobs = found.logprobs or [None] * len(details.token_ids)
    for token, drafted, end, one in zip(
        details.token_ids, details.drafted, details.ends, logprobs, strict=True
    ):
        pieces.append(Piece(found.text[start:end], token, drafted, True, one))
        start = end
    if not pieces or start < len(found.text):
        pieces.append(Piece(found.text[start:], None))
    last = pieces[-1]
    last.more = False
    if found.finish_reason:
        last.finish_reason, last.matched = FinishReason(found.finish_reason), details.stop_reason
        last.rejected = details.rejected
    if details.cached_tokens is not None:
        first = pieces[0]
        first.prompt_tokens, first.cached_tokens = found.prompt_tokens, details.cached_tokens
        first.queued = details.queued
    return pieces


def _known(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """A dataclass of the values that it has; another version of the server may know more."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
