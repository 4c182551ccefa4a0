# SPDX-License-Identifier: Apache-2.0
"""What the HTTP server costs, and whether it holds out.

*Overhead*: 16 streams of chat completions from a process of their own, in turn with the same sequences stepped in this
process without a server; the demo engine, one thread. The difference of the two by the token is what the server adds
beyond the engine's steps: of the times that pass, and of the processor time of this process, which depends less on what
else the machine does. Beside them stands the processor time of the thread that serves.

*Load*: clients that ask again and again, some of which leave in the middle, of a server in a process of its own; its
memory and its free slots before and after.

    python scripts/bench/server.py ENGINE [--rounds N] [--seconds S] [--announce FILE] [--out docs/results/server.json]

ENGINE is the demo engine, built for 16 sequences of 1024 tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn
from _load import MESSAGES
from _process import run_file
from _quiet import Announcement, Cpu, machine

from nemo_build.runtime import Engine, SamplingParams
from nemo_build.runtime.server.app import create_app
from nemo_build.runtime.server.backend import EngineBackend
from nemo_build.runtime.server.run import Server, listen

HERE = Path(__file__).parent
STREAMS, TOKENS = 16, 900
CLIENTS, LEAVING, LOAD_TOKENS = 64, 0.2, 200
WARM_UP_SECONDS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--announce", type=Path)
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs/results/server.json")
    asked = parser.parse_args()
    with Announcement(asked.announce) as announcement:
        found = {
            **machine(),
            "command": "python scripts/bench/server.py",
            "uvicorn": uvicorn.__version__,
            "overhead": [
                overhead(asked.engine, speculate, asked.rounds, announcement) for speculate in ("none", "mtp")
            ],
            "load": load(asked.engine, asked.seconds, announcement),
        }
    asked.out.write_text(json.dumps(found, indent=1) + "\n")


def overhead(engine_path: Path, speculate: str, rounds: int, announcement: Announcement) -> dict[str, Any]:
    """Microseconds of the server by the token."""
    options: dict[str, Any] = {} if speculate == "none" else {"draft_length": 3}
    engine = Engine.load(engine_path, max_sequences=STREAMS, threads=1, speculate=speculate, **options)
    prompt = engine.chat_prompt(MESSAGES)
    alone: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    thread_us, chunks = [], 0
    with listen("127.0.0.1", 0) as listening:
        server = Server(create_app(EngineBackend(engine, speculate=speculate)))
        thread = threading.Thread(target=server.run, args=[[listening]])
        thread.start()
        job = {"do": "streams", "port": listening.getsockname()[1], "count": STREAMS, "tokens": TOKENS}
        run_file(HERE / "_load.py", job | {"tokens": 50})
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        for _ in range(rounds):
            announcement.begin()
            alone.append(_stepped(engine, prompt))
            start, cpu = time.clock_gettime(clock), time.process_time()
            found = run_file(HERE / "_load.py", job)
            served.append((found["seconds"], time.process_time() - cpu))
            thread_us.append((time.clock_gettime(clock) - start) * 1e6 / (STREAMS * TOKENS))
            chunks = found["chunks"]
        announcement.end()
        server.stop()
        thread.join()

    def of_token(values: Iterable[float]) -> float:
        return statistics.median(values) * 1e6 / (STREAMS * TOKENS)

    return {
        "streams": STREAMS,
        "tokens": TOKENS,
        "speculator": speculate,
        "chunks": chunks,
        "engine_us_per_token": of_token(seconds for seconds, _ in alone),
        "served_us_per_token": of_token(seconds for seconds, _ in served),
        "engine_cpu_us_per_token": of_token(cpu for _, cpu in alone),
        "served_cpu_us_per_token": of_token(cpu for _, cpu in served),
        "server_us_per_token": of_token(s[0] - a[0] for s, a in zip(served, alone, strict=True)),
        "server_cpu_us_per_token": of_token(s[1] - a[1] for s, a in zip(served, alone, strict=True)),
        "server_thread_us_per_token": statistics.median(thread_us),
    }


def _stepped(engine: Engine, prompt: list[int]) -> tuple[float, float]:
    """Seconds of the same sequences without a server, and of processor time."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    requests = engine.requests([prompt] * STREAMS, params, skip_special_tokens=False)
    start, cpu = time.perf_counter(), time.process_time()
    engine.add(requests)
    while not all(r.finished for r in requests):
        engine.step()
        for request in requests:
            request.events.clear()
    return time.perf_counter() - start, time.process_time() - cpu


def load(engine: Path, seconds: float, announcement: Announcement) -> dict[str, Any]:
    """What clients saw, and what the server held before and after."""
    code = "from nemo_build.cli import main; main()"
    words = ["serve", str(engine), "--port", "0", "--max-sequences", "16", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split()[0]
        job = {"do": "load", "port": int(url.rsplit(":", 1)[1]), "clients": CLIENTS}
        job |= {"leaving": LEAVING, "tokens": LOAD_TOKENS}
        run_file(HERE / "_load.py", job | {"seconds": WARM_UP_SECONDS})
        announcement.begin()
        before, busy = _held(server.pid, url), Cpu.now()
        found = run_file(HERE / "_load.py", job | {"seconds": seconds})
        after = Cpu.now()
        idle_share = (after.idle - busy.idle) / (after.total - busy.total)
        held = _held(server.pid, url)
        announcement.end()
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    assert status == 0, status
    assert held["running"] == held["waiting"] == held["slots_used"] == 0, held
    return {
        "clients": CLIENTS,
        "slots": 16,
        "seconds": seconds,
        "leaving": LEAVING,
        **found,
        "before": before,
        "after": held,
        "cpu_idle": idle_share,
    }


def _held(pid: int, url: str) -> dict[str, float]:
    """What a server holds when nobody asks anything."""
    time.sleep(1)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    names = {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "slots_used": "num_slots_used",
    }
    found = {
        name: float(re.search(rf"^nemo:{metric}{{.*}} (\S+)$", text, re.M)[1])  # type: ignore[index]
        for name, metric in names.items()
    }
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {**found, "rss_mb": pages * 4096 / 1e6, "threads": threads, "files": files}


if __name__ == "__main__":
    main()
