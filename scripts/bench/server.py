# SPDX-License-Identifier: Apache-2.0
"""What the HTTP server costs, and whether it holds out.

*Overhead*: 16 streams of chat completions from a process of their own, in turn with the same sequences stepped in this
process without a server; the demo engine, one thread. The difference of the two times, by the token, is what the server
adds beyond the engine's steps; the processor time of the server's thread stands beside it, because that thread and the
engine's share Python's lock.

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
    alone, served, thread_us, chunks = [], [], [], 0
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
            start = time.clock_gettime(clock)
            found = run_file(HERE / "_load.py", job)
            served.append(found["seconds"])
            thread_us.append((time.clock_gettime(clock) - start) * 1e6 / (STREAMS * TOKENS))
            chunks = found["chunks"]
        announcement.end()
        server.stop()
        thread.join()
    tokens = STREAMS * TOKENS
    differences = [(s - a) * 1e6 / tokens for s, a in zip(served, alone, strict=True)]
    return {
        "streams": STREAMS,
        "tokens": TOKENS,
        "speculator": speculate,
        "chunks": chunks,
        "engine_us_per_token": statistics.median(alone) * 1e6 / tokens,
        "served_us_per_token": statistics.median(served) * 1e6 / tokens,
        "server_us_per_token": statistics.median(differences),
        "server_us_per_token_by_round": differences,
        "server_thread_us_per_token": statistics.median(thread_us),
    }


def _stepped(engine: Engine, prompt: list[int]) -> float:
    """Seconds of the same sequences without a server."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    requests = engine.requests([prompt] * STREAMS, params, skip_special_tokens=False)
    start = time.perf_counter()
    engine.add(requests)
    while not all(r.finished for r in requests):
        engine.step()
        for request in requests:
            request.events.clear()
    return time.perf_counter() - start


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
        run_file(HERE / "_load.py", job | {"seconds": 5})
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
