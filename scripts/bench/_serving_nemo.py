# SPDX-License-Identifier: Apache-2.0
"""nemo-build as a contender of serving.py: the asyncio front, in the process that asks.

Options: `speculate`, the name of a speculator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from _serving import Job, clock, closed_loop, report

from nemo_build.runtime import Engine
from nemo_build.runtime.async_engine import AsyncEngine
from nemo_build.runtime.bench.load import Trace
from nemo_build.runtime.bench.measure import Drafts


async def serve(engine: Engine, job: Job, traces: Sequence[Trace]) -> None:
    """Answer requests."""
    async with AsyncEngine(engine) as front:

        async def send(trace: Trace) -> None:
            async for chunk in front.stream(trace.request.tokens, trace.request.params):
                trace.add(chunk, clock())

        await closed_loop(traces, job.streams, send)


def main() -> None:
    job = Job.read()
    engine = Engine.load(
        job.model,
        max_sequences=job.streams,
        max_context=job.context,
        threads=job.threads,
        speculate=job.options.get("speculate", "none"),
    )
    asyncio.run(serve(engine, job, job.warm_up()))
    before, traces = Drafts.of(engine.acceptance), job.traces()
    asyncio.run(serve(engine, job, traces))
    drafts = Drafts.of(engine.acceptance) - before
    report(
        traces, acceptance_length=drafts.length, drafted=sum(drafts.drafted), accepted=sum(drafts.accepted)
    )


if __name__ == "__main__":
    main()
