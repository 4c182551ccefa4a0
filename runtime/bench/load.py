# SPDX-License-Identifier: Apache-2.0
"""The load generator: keeps an engine busy with requests and notes when each token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from nemo_build.runtime.async_engine import AsyncEngine
from nemo_build.runtime.bench.prompts import TokenPrompt
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.output import Chunk
from nemo_build.runtime.params import SamplingParams

WARM_UP_TOKENS = 32
"""Tokens that a warm-up request generates at most."""

Finished = Callable[[], object]
"""Called when a request has ended."""

_clock = time.perf_counter


@dataclass(frozen=True)
class Request:
    """What is asked of the engine.

    Attributes:
        index: Which of the run's requests it is; the same in every setting.
        category: What kind of text its prompt is.
        tokens: Its prompt's token ids.
        params: How to go on from there.
    """

    index: int
    category: str
    tokens: tuple[int, ...]
    params: SamplingParams


@dataclass
class Trace:
    """What came of a request.

    Attributes:
        request: The request.
        sent: When it was sent, in seconds of a clock of the run.
        times: When each token came, by the same clock.
        tokens: The tokens' ids.
        drafted: Of each token, whether it was a draft that was accepted.
    """

    request: Request
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)

    def add(self, chunk: Chunk, now: float) -> None:
        """Note what came at the time `now`."""
        if chunk.token_id is not None:
            self.times.append(now)
            self.tokens.append(chunk.token_id)
            self.drafted.append(chunk.drafted)


class LoadGenerator:
    """Sends requests to an engine, in one of two ways. All that it asks of the engine is in this class.

    Args:
        engine: An engine with as many slots as there are to be sequences at a time.
        streams: How many those are.
    """

    def __init__(self, engine: Engine, streams: int) -> None:
        self._engine = engine
        self._streams = streams

    def closed_loop(self, requests: Sequence[Request], finished: Finished) -> list[Trace]:
        """Keep all streams busy: a stream sends its next request when its last one has ended.

        All requests are in one call of :meth:`Engine.stream`, which runs as many at a time as it has slots, in
        order. So one thread reads all tokens of a step before the next step begins, and none is noted late.

        Returns:
            A trace for each request.
        """
        traces = [Trace(r) for r in requests]
        chunks = self._engine.stream([r.tokens for r in requests], [r.params for r in requests])
        start = _clock()
        waiting = iter(traces)
        for trace in islice(waiting, self._streams):
            trace.sent = start
        for chunk in chunks:
            now = _clock()
            traces[chunk.index].add(chunk, now)
            if chunk.finish_reason is not None:
                if (following := next(waiting, None)) is not None:
                    following.sent = now
                finished()
        return traces

    def open_loop(
        self, requests: Sequence[Request], arrivals: NDArray[np.float64], finished: Finished
    ) -> list[Trace]:
        """Send each request at its time, whether earlier ones have ended or not.

        Args:
            requests: The requests.
            arrivals: ``[len(requests)]``: seconds from the start, ascending.
            finished: Called when a request has ended.

        Returns:
            A trace for each request. It was sent when it should have been: if that could not be kept, because the
            machine was busy, the delay is the request's.
        """
        return asyncio.run(self._open_loop(requests, arrivals, finished))

    async def _open_loop(
        self, requests: Sequence[Request], arrivals: NDArray[np.float64], finished: Finished
    ) -> list[Trace]:
        async with AsyncEngine(self._engine) as front:
            start = _clock()
            traces = [Trace(r, start + at) for r, at in zip(requests, arrivals.tolist(), strict=True)]
            readers = []
            for trace in traces:
                await asyncio.sleep(max(0.0, trace.sent - _clock()))
                readers.append(asyncio.create_task(_read(front, trace, finished)))
            await asyncio.gather(*readers)
        return traces


async def _read(front: AsyncEngine, trace: Trace, finished: Finished) -> None:
    """Send a request now and note its tokens."""
    async for chunk in front.stream(trace.request.tokens, trace.request.params):
        trace.add(chunk, _clock())
    finished()


def poisson_arrivals(count: int, rate: float, seed: int) -> NDArray[np.float64]:
    """Times of arrivals that know nothing of each other; the same for the same seed.

    Args:
        count: How many.
        rate: Arrivals per second on average, > 0.
        seed: Of the random numbers.

    Returns:
        ``[count]``: seconds from the first, which is 0, ascending.
    """
    gaps = np.random.default_rng(seed % 2**64).exponential(1 / rate, count)
    gaps[:1] = 0
    times: NDArray[np.float64] = np.cumsum(gaps)
    return times


def make_requests(prompts: Sequence[TokenPrompt], count: int, params: SamplingParams) -> list[Request]:
    """Requests over the prompts in turn.

    Args:
        prompts: At least one; after the last the first comes again.
        count: How many requests.
        params: Of all of them, with a seed; each request gets one of its own, counted from it.
    """
    seed = params.seed or 0
    return [
        Request(i, p.category, p.tokens, replace(params, seed=(seed + i) % 2**64))
        for i, p in zip(range(count), cycle(prompts), strict=False)
    ]


def warm_up_requests(requests: Sequence[Request], count: int) -> list[Request]:
    """Requests like the others, but short."""
    return [
        replace(
            r, params=replace(r.params, max_tokens=min(r.params.max_tokens, WARM_UP_TOKENS), min_tokens=0)
        )
        for r in islice(cycle(requests), count)
    ]
