# SPDX-License-Identifier: Apache-2.0
"""From what is asked to pieces of answers, several answers at a time."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Scheduling
from nemo_build.runtime.server.backend import Backend, Piece
from nemo_build.runtime.server.metrics import Metrics
from nemo_build.runtime.stopping import FinishReason

__all__ = ["Asked", "Usage", "generate", "seed_of"]

_ONE_BY_ONE = 2
"""Answers to one prompt that begin one after the other."""

_LEAST_SECONDS = 1e-3
"""Of an answer whose time was up before it began; it has to have some."""


@dataclass(frozen=True)
class Asked:
    """One answer that is wanted.

    Attributes:
        prompt: Token ids.
        params: How to go on from there.
        scheduling: What it asks of the scheduler.
        skip_special_tokens: Leave control tokens out of the text.
    """

    prompt: Sequence[int]
    params: SamplingParams
    scheduling: Scheduling = field(default_factory=Scheduling)
    skip_special_tokens: bool = False


@dataclass
class Usage:
    """Tokens of a request, all its answers together.

    Attributes:
        prompt: Of the prompts; a prompt of several answers counts once.
        cached: How many of these came from the prefix cache.
        completion: Generated.
        reasoning: How many of these were thinking.
        accepted: How many of the generated ones were drafts.
        rejected: Drafts that were rejected, where that is known.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0

    def count(self, pieces: Sequence[Piece]) -> None:
        """Count new pieces."""
        for piece in pieces:
            self.completion += piece.token_id is not None
            self.accepted += piece.drafted
            self.rejected += piece.rejected

    def to_json(self) -> dict[str, object]:
        """As the member ``usage`` of an answer."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
        }


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of the answer with this index: each has its own, and the first that of the request."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest())


async def generate(
    backend: Backend, metrics: Metrics, asked: Sequence[Asked]
) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """The pieces of all answers as they come: an answer's index, and all that is there of it.

    Where prefixes are cached, the first two answers to a prompt begin one after the other, and the rest when the second
    has its first token: the cache keeps the state that they need when it sees a prompt for the second time. Answers to
    one prompt share the object.

    Closing the generator ends what still runs. Errors are those of :meth:`Backend.stream`; one ends all answers.
    """
    if len(asked) == 1:
        async with aclosing(_batches(backend, metrics, asked[0])) as batches:
            async for pieces in batches:
                yield 0, pieces
        return
    queue: asyncio.Queue[tuple[int, list[Piece] | None]] = asyncio.Queue()

    # Without a cache nothing is ever looked up, and there is nothing to wait for.
    turns = _turns(asked) if backend.statistics().cache.queries else [(None, None)] * len(asked)

    async def run(index: int) -> None:
        behind, begun = turns[index]
        try:
            async with aclosing(_batches(backend, metrics, asked[index], behind)) as batches:
                async for pieces in batches:
                    queue.put_nowait((index, pieces))
                    if begun is not None:
                        begun.set()
        finally:
            if begun is not None:
                begun.set()

    tasks = [asyncio.create_task(run(i)) for i in range(len(asked))]
    for i, task in enumerate(tasks):
        task.add_done_callback(lambda _, i=i: queue.put_nowait((i, None)))  # type: ignore[misc]
    left = len(tasks)
    try:
        while left:
            index, found = await queue.get()
            if found is not None:
                yield index, found
                continue
            left -= 1
            tasks[index].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _turns(asked: Sequence[Asked]) -> list[tuple[asyncio.Event | None, asyncio.Event | None]]:
    """Of each answer: behind which event it begins, and which it sets when it has its first token."""
    known: dict[int, list[asyncio.Event]] = {}  # by the prompt
    turns = []
    for one in asked:
        events = known.setdefault(id(one.prompt), [])
        behind = events[-1] if events else None
        own = None
        if len(events) < _ONE_BY_ONE:
            own = asyncio.Event()
            events.append(own)
        turns.append((behind, own))
    return turns


async def _batches(
    backend: Backend, metrics: Metrics, asked: Asked, behind: asyncio.Event | None = None
) -> AsyncGenerator[list[Piece], None]:
    """An answer's pieces, those together that are there together; none before `behind` is set."""
    timer = metrics.start(asked.params.max_tokens)
    reason: FinishReason | None = FinishReason.CANCELLED
    try:
        scheduling = asked.scheduling
        if behind is not None:
            scheduling = await _waited(behind, scheduling)
        stream = backend.stream(
            asked.prompt, asked.params, scheduling, skip_special_tokens=asked.skip_special_tokens
        )
        async with aclosing(stream):
            pieces: list[Piece] = []
            async for piece in stream:
                pieces.append(piece)
                if piece.more:
                    continue
                if pieces[0].prompt_tokens is not None:
                    timer.begin(pieces[0].prompt_tokens, pieces[0].cached_tokens or 0, pieces[0].queued)
                accepted = sum([p.drafted for p in pieces])
                timer.tokens(len(pieces) - (piece.token_id is None), accepted)
                if piece.finish_reason is not None:
                    reason = piece.finish_reason
                yield pieces
                pieces = []
    except Exception:
        reason = None
        raise
    finally:
        timer.finish(reason)


async def _waited(behind: asyncio.Event, scheduling: Scheduling) -> Scheduling:
    """What is asked of the scheduler when an event is set: what was asked now, with less time."""
    if scheduling.timeout is None:
        await behind.wait()
        return scheduling
    start = time.monotonic()
    await behind.wait()
    left = scheduling.timeout - (time.monotonic() - start)
    return replace(scheduling, timeout=max(left, _LEAST_SECONDS))
