# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server as a contender of serving.py: its own process with as many slots as there are streams, over HTTP.

Options: `programs`, the directory of the programs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path

import _llama_cpp
from _serving import Job, clock, closed_loop, report

from nemo_build.runtime.bench.load import Trace

_FIXED = {
    "stream": True,
    "return_tokens": True,
    "cache_prompt": False,
    "ignore_eos": True,
    "samplers": ["top_k"],
    "top_k": 1,
    "temperature": 0.0,
}
"""Greedy, with no sampler in the way that greedy decoding does not need."""


async def send(port: int, trace: Trace) -> None:
    """One request; each event of the answer has the tokens that are new."""
    wanted = {"prompt": list(trace.request.tokens), "n_predict": trace.request.params.max_tokens}
    body = json.dumps({**_FIXED, **wanted}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    status = (await reader.readline()).split()
    if status[1:2] != [b"200"]:
        sys.exit(f"llama-server answers {status}: {(await reader.read())[-500:]!r}")
    async for line in reader:
        if line.startswith(b"data: "):
            now, event = clock(), json.loads(line[6:])
            tokens = event.get("tokens", [])
            trace.tokens += tokens
            trace.times += [now] * len(tokens)
    writer.close()


def main() -> None:
    job = Job.read()
    programs, model = Path(job.options["programs"]), Path(job.model)
    with _llama_cpp.serve(programs, model, job.threads, slots=job.streams, context=job.context) as port:
        asyncio.run(closed_loop(job.warm_up(), job.streams, partial(send, port)))
        traces = job.traces()
        before = time.process_time()
        asyncio.run(closed_loop(traces, job.streams, partial(send, port)))
        client = time.process_time() - before
    report(traces, client_cpu_s=client)


if __name__ == "__main__":
    main()
