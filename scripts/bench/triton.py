# SPDX-License-Identifier: Apache-2.0
"""What a Triton server costs: an iteration of the scheduler in a server beside one of the runtime alone.

    .venv-triton/bin/python scripts/bench/triton.py WORK [--rounds N] [--out docs/results/triton.json]

WORK holds the engine of the demo checkpoint, which is made if it is not there. All contenders answer the same requests
at the same time, greedily and to their full length: the runtime itself, a server whose steps are models of their own,
and one whose only model holds the whole engine; each without drafts and with three drafts of the MTP module. They take
turns; what counts is the time from the first request to the last answer by the scheduler's steps meanwhile, of which
medians over the rounds are shown. With `stream` clients get every token by itself. The model is small on purpose: what
a server costs does not depend on its size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _models
from _quiet import Announcement, machine, wait_until_idle

from nemo_build.runtime import Engine, SamplingParams
from nemo_build.runtime.opening import Options
from nemo_build.runtime.triton_client import TritonClient
from nemo_build.triton_repo.render import render
from nemo_build.triton_repo.server import Ports, TritonServer

STREAMS = (1, 4, 8)
TOKENS = 192
DRAFTS: dict[str, dict[str, Any]] = {"none": {}, "mtp": {"speculate": "mtp", "draft_length": 3}}
PROMPTS = [f"def function_{i}(" for i in range(max(STREAMS))]
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

_SHOWN = 0.2
"""Seconds after which the gauges show all that has happened."""

Ask = Callable[[str], Any]


class Alone:
    """The runtime in a process of its own, as its threads and those of the clients would slow each other down."""

    def __init__(self, stack: ExitStack, engine: Path, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        process = context.Process(target=_run_alone, args=(theirs, engine, options), daemon=True)
        process.start()
        stack.callback(process.join, 30)
        stack.callback(self._orders.send, None)

    def answer(self, prompts: list[str]) -> float:
        """Answer all of them; returns milliseconds an iteration."""
        self._orders.send(prompts)
        found: float = self._orders.recv()
        return found


def _run_alone(orders: Connection, engine: Path, options: dict[str, Any]) -> None:
    loaded = Engine.load(engine, threads=1, **options)
    while (prompts := orders.recv()) is not None:
        steps, start = loaded.statistics().steps, time.perf_counter()
        loaded.generate(prompts, PARAMS)
        seconds = time.perf_counter() - start
        orders.send(1e3 * seconds / (loaded.statistics().steps - steps))


class Served:
    """A server, asked over gRPC."""

    def __init__(self, ports: Ports, *, stream: bool) -> None:
        self._metrics = f"http://127.0.0.1:{ports.metrics}/metrics"
        self._client = TritonClient(f"127.0.0.1:{ports.grpc}")
        self._ask: Ask = self._stream if stream else self._whole

    def answer(self, prompts: list[str]) -> float:
        """Answer all of them, each asked by a thread of its own; returns milliseconds an iteration."""
        steps = self._steps()
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(self._ask, prompts))
        seconds = time.perf_counter() - start
        return 1e3 * seconds / (self._steps() - steps)

    def _steps(self) -> int:
        time.sleep(_SHOWN)
        with urllib.request.urlopen(self._metrics, timeout=10) as reply:
            found = re.search(r"^nemo_build_steps{.*} (\S+)$", reply.read().decode(), re.M)
        return int(float(found[1])) if found else 0

    def _whole(self, prompt: str) -> Any:
        return self._client.generate(prompt, PARAMS)

    def _stream(self, prompt: str) -> Any:
        return list(self._client.stream(prompt, PARAMS))


def serve(
    stack: ExitStack, engine: Path, folder: Path, options: dict[str, Any], *, in_process: bool
) -> Ports:
    """Start a server."""
    rendered = render(engine, folder, Options(threads=1, **options), in_process=in_process, force=True)
    ports = Ports.free()
    log = stack.enter_context((folder.parent / f"{folder.name}.log").open("wb"))
    models = [*rendered.models, "generate"]
    server = stack.enter_context(TritonServer(folder, ports, models=models, log=log))
    server.wait()
    return ports


def contenders(stack: ExitStack, work: Path, drafts: str) -> dict[str, Alone | Served]:
    """What is measured, by name."""
    engine = _models.demo_engine(work, sequences=max(STREAMS), context=512)
    options = DRAFTS[drafts]
    found: dict[str, Alone | Served] = {"runtime": Alone(stack, engine, options)}
    for name, in_process in (("steps", False), ("in-process", True)):
        ports = serve(stack, engine, work / f"repository-{drafts}-{name}", options, in_process=in_process)
        found[name] = Served(ports, stream=False)
        found[f"{name}, stream"] = Served(ports, stream=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for an idle machine")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="is there while something is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    cases = []
    for drafts in DRAFTS:
        samples: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in STREAMS}
        with ExitStack() as stack, Announcement(options.announce) as announcement:
            found = contenders(stack, options.work, drafts)
            for contender in found.values():
                contender.answer(PROMPTS)
            for _ in range(options.rounds):
                announcement.begin()
                wait_until_idle(options.wait)
                for streams in STREAMS:
                    for name, contender in found.items():
                        samples[streams][name].append(contender.answer(PROMPTS[:streams]))
        for streams, by_name in samples.items():
            medians = {name: round(statistics.median(values), 3) for name, values in by_name.items()}
            cases.append({"drafts": drafts, "streams": streams, "iteration_ms": medians})
            shown = ", ".join(f"{n} {v:.2f} ({v - medians['runtime']:+.2f})" for n, v in medians.items())
            print(f"{drafts}, {streams} at a time, ms: {shown}", flush=True)
    if options.out:
        command = "python scripts/bench/triton.py WORK"
        record = {
            "bench": "triton",
            "command": command,
            **machine(),
            "rounds": options.rounds,
            "cases": cases,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
