# SPDX-License-Identifier: Apache-2.0
"""What the contenders of serving.py have in common: a job that comes on standard input, a closed loop, and a report.

A contender is a script that runs in a process of its own: it opens the model, warms up, answers the job's requests
with so many of them at a time, and prints what :func:`report` makes of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nemo_build.runtime.bench.load import Request, Trace
from nemo_build.runtime.bench.measure import statistics
from nemo_build.runtime.params import SamplingParams

WARM_UP_PROMPT, WARM_UP_OUTPUT = 16, 4

Send = Callable[[Trace], Awaitable[None]]
"""Has a request answered, noting tokens and times in its trace."""

clock = time.perf_counter


@dataclass(frozen=True)
class Job:
    """What a contender does.

    Attributes:
        model: Path of the model, in the contender's own format.
        threads: CPU threads.
        streams: Requests at a time.
        context: Positions that a request needs at most.
        prompts: Token ids of each request.
        outputs: How many tokens each request generates, whatever they are.
        options: What else the contender wants to know.
    """

    model: str
    threads: int
    streams: int
    context: int
    prompts: list[list[int]]
    outputs: list[int]
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def read(cls) -> Job:
        """The job on standard input."""
        return cls(**json.load(sys.stdin))

    def traces(self) -> list[Trace]:
        """A trace for each request."""
        return _traces(self.prompts, self.outputs)

    def warm_up(self) -> list[Trace]:
        """Short requests, one a stream."""
        return _traces(
            [p[:WARM_UP_PROMPT] for p in self.prompts[: self.streams]], [WARM_UP_OUTPUT] * self.streams
        )


def _traces(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> list[Trace]:
    return [
        Trace(Request(i, "", tuple(p), SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)))
        for i, (p, n) in enumerate(zip(prompts, outputs, strict=False))
    ]


async def closed_loop(traces: Sequence[Trace], streams: int, send: Send) -> None:
    """Answer requests in order, so many at a time: a stream sends its next one when its last one has ended."""
    waiting = iter(traces)

    async def stream() -> None:
        for trace in waiting:
            trace.sent = clock()
            await send(trace)

    await asyncio.gather(*(stream() for _ in range(streams)))


def report(traces: Sequence[Trace], **more: Any) -> None:
    """Print the statistics of a run; refuses a run in which a request got fewer or more tokens than it asked for."""
    for trace in traces:
        wanted = trace.request.params.max_tokens
        if not len(trace.tokens) == len(trace.times) == wanted:
            sys.exit(f"request {trace.request.index} got {len(trace.tokens)} tokens of {wanted}")
    tokens = [t for trace in traces for t in trace.tokens]
    print(json.dumps({**statistics(traces), "distinct_tokens": len(set(tokens)) / len(tokens), **more}))
